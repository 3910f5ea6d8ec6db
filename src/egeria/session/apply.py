"""Applies or refuses the depth that a policy asks for: the only code that freezes and thaws."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from egeria.distributed import ddp, fsdp2
from egeria.distributed.ranks import is_initialized
from egeria.events import ModuleFrozen, Thawed
from egeria.model.cut import Cut, LayerModule
from egeria.model.freeze import Freezer
from egeria.model.group import find_pieces
from egeria.model.hooks import Hook, sweep
from egeria.model.passes import is_own_pass
from egeria.policy import Depth
from egeria.session.training import FreezingEndedError, Training

# Of an iteration: the backward pass has two multiplications for each one of the forward pass.
BACKWARD_SHARE = 2 / 3
IDLE = (
    "one of the optimizers would have nothing left to train, which GradScaler takes for an error. "
    "Give one optimizer all parameters, in groups"
)


class Applier:
    """Freezes and thaws the layer modules of one cut, also within DistributedDataParallel."""

    def __init__(self, training: Training, cut: Cut, wrapper: Any) -> None:
        self._training, self.cut = training, cut
        self._model, self._recorder = training.model, training.recorder
        self.freezer = Freezer(training.model, cut, has_hooks=training.compilation is None)
        self.freezer.keeps_norms = not training.is_pretrained  # else it was not measured
        self.wrapper, self._is_sharded = wrapper, fsdp2.is_sharded(training.model)
        self._told = 0  # the depth according to the journal
        self.detaches = True  # whether boundaries may still be detached
        parameters = dict(training.model.named_parameters())
        self._sizes = {name: entry.numel() for name, entry in parameters.items()}
        self._num_trainable = sum(e.numel() for e in parameters.values() if e.requires_grad)
        self.deepest, self.limit = self._find_deepest()

    @property
    def depth(self) -> int:
        """How many front layer modules are frozen."""
        return self.freezer.depth

    def open(self) -> None:
        """Watch for pieces that first run later: one may train in front of a detached boundary."""
        if self._training.compilation is not None or not any(self.cut.detaches):
            return
        ran = {name for module in self.cut.modules for name in module.submodules}
        for piece in find_pieces(self._model, self._training.config.modules.pattern):
            if piece.role != "direct" and piece.name not in ran:
                piece.module.register_forward_pre_hook(Hook(self, Applier._runs_late))

    def refusal(self, depth: int, seconds_left: float | None) -> str:
        """Return why this depth is refused, or an empty string."""
        if depth > self.deepest:
            return self.limit or "the last layer module is never frozen"
        if depth < 0:
            return "a depth is 0 or more"
        # One that has not stepped yet makes all momenta in its first step.
        sgds = [e for e in self._training.optimizers if isinstance(e, torch.optim.SGD)]
        groups = [group for sgd in sgds if not sgd.state for group in sgd.param_groups]
        if depth and any(group.get("fused") and group["momentum"] for group in groups):
            return "fused SGD with momentum fails on parameters added later. Leave fused=True out"
        if self._training.compilation is None or seconds_left is None or depth <= self.depth:
            return ""
        share = sum(module.share for module in self.cut.modules[self.depth : depth])
        return self._training.compilation.repays(BACKWARD_SHARE * share * seconds_left) or ""

    def apply(self, depth: Depth, window: int) -> None:
        """Freeze and thaw so that `depth.frozen` layer modules are frozen, and journal it."""
        self.set_depth(depth.frozen)
        self._tell(depth.reason, window)

    def count(self, module: LayerModule) -> int:
        """Return how many elements the parameters of a layer module have that freeze with it."""
        return sum(self._sizes.get(name, 0) for name in module.parameters)

    def _tell(self, reason: str, window: int = 0) -> None:
        """Journal what is frozen now, if the journal has another depth."""
        modules, step = self.cut.modules, self._recorder.step
        if (before := self._told) > self.depth:
            thawed = Thawed(step=step, frozen_before=before, reason=reason, window=window)
            self._recorder.write(thawed)
            self._told = 0
        while (number := self._told) < self.depth:
            num_frozen = sum(map(self.count, modules[: number + 1]))
            frozen = ModuleFrozen(
                step=step,
                module=number,
                name=modules[number].name,
                frozen=number + 1,
                reason=reason,
                parameter_share=num_frozen / max(1, self._num_trainable),
            )
            self._recorder.write(frozen)
            self._told = number + 1

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Freeze as deep as in a saved state, which is in the journal already."""
        self._told, self.detaches = saved["frozen"], saved["detaches"]
        self.freezer.keeps_norms = saved["keeps_norms"]
        self.set_depth(self._told)
        for name in saved["trained"]:  # the loop had made them train, in the frozen front
            self._model.get_parameter(name).requires_grad_(True)
        if self.wrapper is None and is_initialized():  # found in the first forward pass
            self._model.register_forward_pre_hook(Hook(self, Applier._find_wrapper))

    def make_whole(self) -> None:
        """Finish a change of depth that was interrupted."""
        if not self.freezer.is_whole:
            self.set_depth(self._told)
        self._tell("a change was interrupted")

    def check_unmoved(self) -> None:
        """Raise FreezingEndedError if the training loop has changed frozen parameters."""
        if self._is_sharded:
            fsdp2.reshard(self._model)
        if moved := self.freezer.moved():
            what = "frozen parameters were changed by the training loop"
            raise FreezingEndedError(f"{what} ({', '.join(moved[:3])})")

    def set_depth(self, depth: int) -> None:
        """Freeze and thaw without journaling; rebuild the gradient reduction between ranks."""
        if depth == self.depth and self.freezer.is_whole:
            return
        if self._is_sharded:
            fsdp2.reshard(self._model)
        self.freezer.freeze_to(depth, detaches=self.detaches)
        if self.wrapper is not None:
            ddp.rebuild_buckets(self.wrapper)
        if self._is_sharded:
            fsdp2.prepare_units(self._model)

    def close(self) -> None:
        """Thaw everything and remove all hooks."""
        self._tell("a change was interrupted")
        self.set_depth(0)
        sweep(self._model, self)

    def _find_wrapper(self, model: nn.Module, *_: Any) -> None:
        if self.wrapper is None and (wrapper := ddp.find_wrapper(model)) is not None:
            self.wrapper = wrapper
            ddp.rebuild_buckets(wrapper)

    def _find_deepest(self) -> tuple[int, str]:
        """Return how deep the model may be frozen with work left for each optimizer, and why."""
        modules, limit = self.cut.modules, self.cut.deepest
        last, reason = len(modules) - 1, self.cut.reason
        places = {name: place for place, each in enumerate(modules) for name in each.parameters}
        named = [entry for entry in self._model.named_parameters() if entry[1].requires_grad]
        for optimizer in self._training.optimizers:
            own = {entry for group in optimizer.param_groups for entry in group["params"]}
            held = [places.get(name, last) for name, entry in named if entry in own]
            if held and max(held) < limit:
                limit, reason = max(held), IDLE
        return limit, reason

    def _runs_late(self, _module: nn.Module, _args: Any) -> None:
        if self.detaches and torch.is_grad_enabled() and not is_own_pass():
            self.detaches = False
            self.freezer.freeze_to(self.depth, detaches=False)
