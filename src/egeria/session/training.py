"""What the user trains, as given to `attach`, and the watch over its first step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from egeria.config import Config
from egeria.distributed import ddp, fsdp2
from egeria.distributed.ranks import is_initialized, together
from egeria.errors import ConfigError, StateError, UnsupportedModelError
from egeria.journal import Recorder
from egeria.model.compile import Compilation
from egeria.model.cut import Cut, LayerModule, make_modules, read_graph, settings_of_cut
from egeria.model.group import find_pieces, parent_of
from egeria.model.hooks import Hook, sweep
from egeria.model.watch import Watch
from egeria.policy import UnfreezeRule
from egeria.session.checks import IN_BACKWARD, length_of, reason_to_decline
from egeria.session.clock import CHECKED_CALLS, NO_STEP

# A model that trains a smaller share of its weights than this is taken to train adapters.
ADAPTED_SHARE = 0.1


def facts_of(model: nn.Module, optimizers: Sequence[Any]) -> dict[str, Any]:
    """Return what `draw_up` takes beside modules, of the model and the optimizers."""
    adaptive = all("betas" in group for optimizer in optimizers for group in optimizer.param_groups)
    parts, total = list(model.modules()), sum(entry.numel() for entry in model.parameters())
    convolutions = nn.ModuleList(p for p in parts if isinstance(p, nn.modules.conv._ConvNd))
    kernels = sum(e.numel() for e in convolutions.parameters())  # `.weight` may be computed anew
    norms = [part for part in parts if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    trained = sum(entry.numel() for entry in model.parameters() if entry.requires_grad)
    return {
        "adaptive": adaptive,
        "convolutional": bool(norms) or 2 * kernels > total,
        "norm_steps": max((1 / (norm.momentum or 1.0) for norm in norms), default=0.0),
        "adapted": ADAPTED_SHARE * total > trained,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The arguments of `attach` without the wrappers of frameworks, and the journal."""

    model: nn.Module  # without any wrapper
    given: nn.Module  # what the loop calls: maybe compiled, or in DistributedDataParallel
    optimizers: Sequence[Any]
    loader: Any
    config: Config
    controller: Any  # one of the user's own, or the name of a kind
    rule: UnfreezeRule
    rule_name: str
    total_steps: int | None
    recorder: Recorder
    compilation: Compilation | None = None  # None if nothing is compiled
    is_pretrained: bool = False  # whether most weights come from an earlier training
    directory: Path | None = None  # of the first rank's journal

    @property
    def policy_name(self) -> str:
        """The name of the policy, or of the callable that makes it."""
        name = self.config.policy.name
        return name if isinstance(name, str) else getattr(name, "__qualname__", type(name).__name__)

    @property
    def device_type(self) -> str:
        """The type of device that the model is on."""
        return next((entry.device.type for entry in self.model.parameters()), "cpu")

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def learning_rate(self, modules: Sequence[LayerModule]) -> float:
        """Return the largest learning rate of the groups that hold what may freeze, or of all."""
        named = self.named()
        own = {id(named.get(name)) for module in modules[:-1] for name in module.parameters}
        fitting = [g for g in self.groups if any(id(entry) in own for entry in g["params"])]
        return max(float(group.get("lr") or 0.0) for group in fitting or self.groups)

    def named(self) -> dict[str, nn.Parameter]:
        """Return all parameters by all of their names."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    def check_state(self, state: Mapping[str, Any], cut: Cut | None) -> None:
        """Raise StateError if a saved state is of another policy, model or way to cut it."""
        name = state["policy_name"]
        if name != self.policy_name:
            raise StateError(
                f"A run goes on under the policy that it began with, {name!r}, found "
                f"{self.policy_name!r}. Give policy={name!r}, or do not load the state."
            )
        if cut is None:
            return
        saved, named = state["engine"]["parameters"], self.named()
        own = {name for module in cut.modules for name in module.parameters}
        own |= {name for name, entry in named.items() if entry.requires_grad}
        shapes = {name: list(entry.shape) for name, entry in named.items()}
        if odd := sorted(name for name in own if shapes.get(name) != saved.get(name)):
            raise StateError(
                "A run's state fits its own model, found that of another model, which differs in "
                f"{', '.join(odd[:3])}. Attach the model it was saved from."
            )
        cut_by, settings = state["engine"]["cut_by"], asdict(self.config.modules)
        if cut_by != settings:
            raise StateError(
                f"A run keeps its layer modules, cut by modules={cut_by}, found {settings}. Give "
                "those, or load the model and the optimizer alone."
            )


class FreezingEndedError(Exception):
    """Nothing may be frozen any more, for a reason that is not an internal error."""


class FirstStep:
    """Watches the user's own passes up to the first update, and cuts the model then.

    With several optimizers it waits until each is at its first step: only then is it known which
    parameters train. A compiled model runs eagerly up to there, since its code fires no hooks.

    Raises:
        FreezingEndedError: the model or an optimizer is declined.
        ConfigError: `modules.pattern` matches nothing in the model.
    """

    def __init__(self, training: Training) -> None:
        if refusal := reason_to_decline(training.given, training.optimizers):
            raise FreezingEndedError(refusal)
        pattern = training.config.modules.pattern
        try:
            self._pieces = find_pieces(training.model, pattern)
        except UnsupportedModelError as error:
            raise (FreezingEndedError if pattern is None else ConfigError)(str(error)) from error
        self._training, self.watch = training, Watch(training.model, self._pieces)
        # DistributedDataParallel around the model; None if there is none, or not yet.
        self.wrapper = ddp.find_wrapper(training.given)
        self._seen: set[str] = set()
        self._num_updates = [0] * len(training.optimizers)

    def open(self) -> None:
        """Begin to watch."""
        self.watch.open()
        model, compilation = self._training.model, self._training.compilation
        if self.wrapper is None and is_initialized():
            model.register_forward_pre_hook(Hook(self, FirstStep._look_for_wrapper))
        if compilation is not None:
            compilation.wait()

    def close(self) -> None:
        """Remove the hooks."""
        self.watch.close()
        sweep(self._training.model, self)

    def comes_to(self, number: int, num_calls: int) -> bool:
        """Note which gradients an optimizer has; return whether all have come to a step."""
        if not (self.watch.rows or num_calls):
            return False  # `torch.distributed.checkpoint` makes a step to get the optimizer's state
        self._num_updates[number] += 1
        if self._num_updates[number] > CHECKED_CALLS:  # watching takes memory
            raise FreezingEndedError(NO_STEP)
        groups = self._training.optimizers[number].param_groups
        own = {entry for g in groups for entry in g["params"] if entry.grad is not None}
        named = self._training.model.named_parameters()
        self._seen |= {name for name, entry in named if entry in own}
        return all(self._num_updates) and bool(self._seen)

    def cut(self) -> tuple[Cut, int | None]:
        """Return the cut, the same on all ranks, and the steps of an epoch, None if unknown.

        Raises FreezingEndedError if nothing can be frozen.
        """
        self.close()
        if torch._C._current_graph_task_id() != -1:
            raise FreezingEndedError(IN_BACKWARD)
        training, watch = self._training, self.watch
        # what ran on all ranks, in the order of the first rank
        views = together(lambda: (list(watch.order), self._seen))
        order = [name for name in views[0][0] if all(name in view[0] for view in views)]
        seen = set.intersection(*(view[1] for view in views))
        self._decline_dropped(order)
        settings = settings_of_cut(training.config.modules, is_pretrained=training.is_pretrained)

        def read() -> Cut:
            if watch.failure:
                raise UnsupportedModelError(watch.failure)
            modules = make_modules(training.model, watch=watch, order=order, seen=seen, **settings)
            trained = {entry for group in training.groups for entry in group["params"]}
            return read_graph(training.model, modules, watch, trained)

        cut = Cut.combine(together(read))
        refusal = None if fsdp2.is_sharded(training.model) else ddp.refuse(self.wrapper)
        if refusal is None and sum(cut.trainable) < 2:
            refusal = "fewer than two layer modules received a gradient in the first step"
        length, calls = length_of(training.loader), max(1, watch.num_calls)
        found = together(lambda: (refusal, length and math.ceil(length / calls)))
        for reason in filter(None, (reason for reason, _ in found)):
            raise FreezingEndedError(reason)
        return cut, found[0][1]

    def _decline_dropped(self, order: Sequence[str]) -> None:
        """Decline blocks that did not run although their siblings did, as under LayerDrop."""
        blocks = [piece for piece in self._pieces if piece.role == "block"]
        kinds = {piece.name: (parent_of(piece.name), type(piece.module)) for piece in blocks}
        ran = {kind for name, kind in kinds.items() if name in order}
        if dropped := [name for name in kinds if name not in order and kinds[name] in ran]:
            self._training.recorder.decline(
                f"freezing {', '.join(dropped)}",
                "it did not run in the first step, and the backward pass will have to reach it",
            )

    def _look_for_wrapper(self, model: nn.Module, *_: Any) -> None:
        self.wrapper = self.wrapper or ddp.find_wrapper(model)
