"""Carrying out what the policy decides: the only code that freezes or thaws; and what that costs a compiled model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.events import FreezeWaits, ModuleFrozen, Recompiled, Rewrapped, Thawed
from egeria.journal import Recorder
from egeria.layers.batch import Batch
from egeria.layers.freezing import Freezer
from egeria.layers.gradients import InputGradients
from egeria.layers.modules import LayerModule, count_trainable
from egeria.layers.shards import outline
from egeria.layers.undisturbed import undisturbed
from egeria.policy import Freeze, Thaw
from egeria.session.following import HarmfulFreezeError, ModelHooks, Training
from egeria.session.ranks import Subject
from egeria.session.timing import Stopwatch


class _Rehearsal(NamedTuple):
    """The outputs in one forward pass: of the layer module about to freeze, and of the model."""

    boundary: list[Tensor]
    outputs: list[Tensor]


BACKWARD_SHARE = 2 / 3
"""Of an iteration: the backward pass has two multiplications where the forward pass has one."""
GRAPHS_PER_FREEZE = 2
"""In training and in inference."""


@dataclass(eq=False)
class Applier:
    """Turns decisions into frozen layers and journal events; `put_in_force` makes them effective for the loop."""

    training: Training
    modules: Sequence[LayerModule]
    compiling: Compiling

    def __post_init__(self) -> None:
        self.recorder, self.parallel = self.training.recorder, self.training.parallel
        freezes_tied = self.training.config.freezing.tied == "freeze"
        self._freezer = Freezer(self.training.model, self.modules, freeze_tied=freezes_tied)
        self._num_trainable = sum(count_trainable(self.training.model, module) for module in self.modules)
        self._gradients = InputGradients(self._decline_saving)
        self._has_declined = False
        self.waiting: list[int] = []
        """Layer modules that were decided to freeze, and train on until compiling again repays itself."""
        self._depth_in_force = 0
        self._was_overruled = False

    @property
    def depth(self) -> int:
        """How many front layer modules are frozen."""
        return self._freezer.depth

    @property
    def decided_depth(self) -> int:
        """How many front layer modules were decided to freeze, waiting ones included."""
        return self.waiting[-1] + 1 if self.waiting else self.depth

    @property
    def is_undone(self) -> bool:
        """Whether the loop switched gradients of a frozen layer on again."""
        return self._was_overruled or self._freezer.is_undone

    def freeze(self, decision: Freeze, batch: Batch | None, saved_s: float | None) -> None:
        """Freeze one more layer module, or let it wait.

        Args:
            decision: what the policy decided.
            batch: a training batch to rehearse the freeze on.
            saved_s: seconds that it saves to the end of the run, with those that wait; None where unknown.

        Raises:
            HarmfulFreezeError: it would have broken the training; everything is thawed then.
        """
        module, step = self.modules[decision.module], self.recorder.step
        reason = self._reason_to_wait(saved_s)
        if reason is not None:
            self.waiting.append(decision.module)
            self.recorder.write(FreezeWaits(step=step, module=decision.module, name=module.name, reason=reason))
            return
        self.waiting = []
        if batch is None:
            self._freezer.freeze_to(decision.module + 1)
        else:
            self._freeze_rehearsed(decision.module, batch)
        self.recorder.write(
            ModuleFrozen(
                step=step,
                module=decision.module,
                name=module.name,
                frozen=self.depth,
                reason=decision.reason,
                parameter_share=self._freezer.num_frozen / max(1, self._num_trainable),
            )
        )

    def thaw(self, decision: Thaw) -> None:
        """Thaw everything."""
        before, self.waiting = self.depth, []
        self._freezer.thaw()
        event = Thawed(step=self.recorder.step, frozen_before=before, reason=decision.reason, window=decision.window)
        self.recorder.write(event)

    def restore(self, depth: int, decided_depth: int) -> None:
        """Freeze to a saved depth, without journaling decisions that were journaled before."""
        self._freezer.freeze_to(depth)
        self.waiting = list(range(depth, decided_depth))
        self.put_in_force()

    def put_in_force(self) -> None:
        """Let the loop call the model as it is now; with several processes, only gradients of what trains are sent."""
        watch, hooks, is_alone = Stopwatch(), self.training.hooks, self.parallel.num_ranks == 1
        has_changed, self._depth_in_force = self._depth_in_force != self.depth, self.depth
        frozen = [name for module in self.modules[: self.depth] for name in module.submodules]
        self.parallel.update(frozen)
        is_watched = self.depth > 0 and (hooks.is_compiled or not is_alone)
        hooks.call_before(self._check_before_forward if is_watched else None)
        if not has_changed:
            return
        # Hooks do not fire in compiled code; units of shards have hooks of their own on what crosses.
        looks = not (hooks.is_compiled or self.training.is_sharded or self._has_declined)
        frozen_modules = self.modules[: self.depth] if looks else ()
        self._gradients.follow([self.training.model.get_submodule(module.tap) for module in frozen_modules])
        self.compiling.note_change()
        if not is_alone:
            trained = [parameter for parameter in self.training.model.parameters() if parameter.requires_grad]
            size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
            self.recorder.write(Rewrapped(step=self.recorder.step, wall_s=watch.read()[0], reduced_bytes=size_bytes))

    def release(self) -> None:
        """Thaw everything without a decision, for good."""
        self.waiting = []
        self._freezer.thaw()
        self.put_in_force()

    def after_step(self) -> None:
        """Cut gradients that run through the frozen layers for nobody, as far as that is known by now."""
        self._gradients.after_step()

    def describe(self) -> str:
        """Return what is frozen and what trains, as text that is the same wherever that is the same."""
        names = (name for name, parameter in self.training.model.named_parameters() if parameter.requires_grad)
        return f"{self.depth} {' '.join(names)}"

    def _reason_to_wait(self, saved_s: float | None) -> str | None:
        """Return why a freeze has to wait: compiling the model again would take longer than it saves."""
        if not self.training.hooks.is_compiled:
            return None
        reason = self.compiling.reason_to_wait(saved_s)
        does_wait = self.training.ranks.from_leader(Subject.GATE, reason is not None)
        return (reason or "the first process waits") if does_wait else None

    def _check_before_forward(self) -> None:
        """Do what hooks of frozen layers cannot: what the loop unfroze must be reduced in this pass already."""
        if self.parallel.num_ranks > 1 and self._freezer.is_undone:
            self._was_overruled = True
            self.release()
        self._freezer.stay_in_inference_mode()

    def _freeze_rehearsed(self, index: int, batch: Batch) -> None:
        """Refuse a freeze that takes the gradient of an output, and report one that saves less than it could."""
        module = self.modules[index]
        self._has_declined = False
        before = self._rehearse(module, batch)
        self._freezer.freeze_to(index + 1, input_needs_grad=batch.needs_grad)
        after = before and self._rehearse(module, batch)
        if before is None or after is None:
            return
        if _is_branch(before, after.outputs):
            self._freezer.thaw()
            raise HarmfulFreezeError(
                f"with {module.name} frozen an output of the model would have no gradient left, "
                f"because it is a branch of its own and not in front of the others"
            )
        if batch.needs_grad or tree.requires_grad(after.boundary):
            self._has_declined = True
            self._decline_saving(
                "its output still needs a gradient, because a trainable tensor outside the frozen layer modules "
                "(the input, or a parameter of another module) feeds it; the backward pass runs through it",
            )

    def _decline_saving(self, reason: str) -> None:
        if self.depth:
            self.recorder.decline(f"the full saving behind {self.modules[self.depth - 1].name}", reason)

    def _rehearse(self, module: LayerModule, batch: Batch) -> _Rehearsal | None:
        """Run the model once, undisturbed but with gradients; an outline of a sharded one, where that is possible."""
        boundary: list[Tensor] = []
        try:
            model, copied = outline(self.training.model, batch.first_rows(None))
            with undisturbed(model, gradients=True), batch.autocast.context():
                tap: nn.Module = model.get_submodule(module.tap)
                hook = tap.register_forward_hook(lambda *call: boundary.extend(tree.leaves(call[-1])))
                try:
                    output = model(*copied.args, **copied.kwargs)
                finally:
                    hook.remove()
        except Exception as error:
            if not self.training.is_sharded:
                raise
            self.recorder.decline("rehearsing a freeze", f"the model does not run without its values ({error})")
            return None
        return _Rehearsal(boundary, list(tree.leaves(output)))


def _is_branch(before: _Rehearsal, outputs_after: Sequence[Tensor]) -> bool:
    """Return whether a freeze took the gradient of an output, and no output that keeps one depends on the module.

    A hidden state that is put out beside the loss may lose its gradient; a head of its own may not.
    """
    pairs = [pair for pair in zip(before.outputs, outputs_after, strict=True) if pair[0].requires_grad]
    kept = [now.float().sum() for now, later in pairs if later.requires_grad]
    boundary = [tensor for tensor in before.boundary if tensor.requires_grad]
    if len(kept) == len(pairs) or not boundary:
        return False
    return not kept or not any(entry is not None for entry in torch.autograd.grad(kept, boundary, allow_unused=True))


@dataclass(eq=False)
class Compiling:
    """Watches what a compiled model costs (`torch.compile`); where nothing is compiled it does nothing.

    A freeze changes what needs a gradient, so that the next forward pass is compiled again. After eight graphs of a
    function torch goes over to running it uncompiled, for good: the limit is raised by what freezing may need, and
    lowered again at the end.
    """

    hooks: ModelHooks
    """On the model; they see whether it is compiled."""
    recorder: Recorder

    def __post_init__(self) -> None:
        self._limits: dict[str, int] = {}
        """Those of torch, as they were."""
        self._seconds = _seconds_so_far()
        self._longest_s = 0.0
        """What the longest compiling took."""
        self._changes = 0
        """Freezes and thaws since compiling was last seen."""

    def make_room(self, num_modules: int) -> None:
        """Let as many graphs of a function be compiled as freezing module by module needs."""
        if not self.hooks.is_compiled or self._limits:
            return
        config: Any = _dynamo().config
        for name, needed in (
            ("recompile_limit", GRAPHS_PER_FREEZE * (num_modules + 1)),
            ("accumulated_recompile_limit", 0),
        ):
            if hasattr(config, name):
                self._limits[name] = getattr(config, name)
                setattr(config, name, self._limits[name] + needed)

    def note_change(self) -> None:
        """Take note that layers were frozen or thawed: what compiles next does so for that."""
        self._changes += 1

    def look(self, step: int) -> float:
        """Return the seconds that freezing made the last iterations compile, and journal them."""
        if not self.hooks.is_compiled:
            return 0.0
        seconds = _seconds_so_far()
        spent, self._seconds = seconds - self._seconds, seconds
        if spent <= 0.0:
            return 0.0
        self._longest_s = max(self._longest_s, spent)
        is_ours, self._changes = self._changes > 0, 0
        self.recorder.write(Recompiled(step=step, wall_s=spent, by_freezing=is_ours))
        return spent if is_ours else 0.0

    def reason_to_wait(self, saved_s: float | None) -> str | None:
        """Return why a freeze that saves so many seconds (None: unknown) has to wait; None if it repays compiling."""
        if saved_s is None or saved_s >= self._longest_s:
            return None
        saves = f"it would save {saved_s:.2g} s to the end of the run"
        return f"{saves}, and compiling anew took up to {self._longest_s:.2g} s"

    def close(self) -> None:
        """Give torch its limits back."""
        limits, self._limits = self._limits, {}
        for name, value in limits.items():
            setattr(_dynamo().config, name, value)


def _seconds_so_far() -> float:
    """Return the seconds that torch has compiled in this process, forward and backward passes."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    spent: dict[str, float] = getattr(_dynamo().utils, "calculate_time_spent", dict)()
    return float(spent.get("total_wall_time", 0.0))


def _dynamo() -> Any:
    return sys.modules["torch._dynamo"]
