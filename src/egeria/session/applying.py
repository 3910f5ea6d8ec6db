"""Carrying out what the policy decides: the only code that freezes or thaws."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from egeria import tree
from egeria.events import FreezeWaits, ModuleFrozen, Rewrapped, Thawed
from egeria.layers.batch import Batch
from egeria.layers.freezing import Freezer
from egeria.layers.gradients import InputGradients
from egeria.layers.modules import LayerModule, count_trainable, parameters_of
from egeria.policy import Decision, Freeze, Thaw
from egeria.session.compiling import Compiling
from egeria.session.following import HarmfulFreezeError, Training
from egeria.session.ranks import Subject
from egeria.session.rehearsing import Rehearsal, find_branch, rehearse
from egeria.session.timing import Stopwatch


def in_groups(decisions: Sequence[Decision]) -> Iterator[tuple[Decision, list[Freeze]]]:
    """Yield decisions in order, with freezes that follow each other as one: the first and all of
    them, else none.
    """
    for is_freeze, group in itertools.groupby(
        decisions, lambda decision: isinstance(decision, Freeze)
    ):
        found = list(group)
        for first in found[:1] if is_freeze else found:
            yield first, [decision for decision in found if isinstance(decision, Freeze)]


@dataclass(eq=False)
class Applier:
    """Turns decisions into frozen layers and journal events; `put_in_force` makes them effective
    for the loop.
    """

    training: Training
    modules: Sequence[LayerModule]
    compiling: Compiling
    deepest_freeze: int
    """The largest number of front layer modules that may be frozen."""
    trainable: Sequence[bool]
    """Whether each layer module had anything to train in the beginning: what had nothing is its
    owner's to unfreeze."""

    def __post_init__(self) -> None:
        self.recorder, self.parallel = self.training.recorder, self.training.parallel
        self._freezer = Freezer(self.training.model, self.modules, trainable=tuple(self.trainable))
        self._num_trainable = sum(
            map(count_trainable, parameters_of(self.training.model, self.modules))
        )
        self._gradients = InputGradients(self._decline_saving)
        self._has_declined = False
        self.waiting: list[int] = []
        """Layer modules that were decided to freeze, and train on until compiling again repays
        itself."""
        self._is_released = False
        self._depth_in_force = 0
        self._was_overruled = False

    @property
    def depth(self) -> int:
        """How many front layer modules are frozen."""
        return self._freezer.depth

    @property
    def decided_depth(self) -> int:
        """How many front layer modules were decided to freeze, those included that wait."""
        return max([self.depth, *(module + 1 for module in self.waiting)])

    @property
    def is_undone(self) -> bool:
        """Whether the loop switched gradients on again of a layer that is frozen."""
        return self._was_overruled or self._freezer.is_undone

    def freeze(
        self, decisions: Sequence[Freeze], batch: Batch | None, saved_s: float | None
    ) -> None:
        """Freeze more layer modules at once, or let them wait.

        Args:
            decisions: what the policy decided, front to back.
            batch: a training batch to rehearse the freeze on.
            saved_s: seconds that they save to the end of the run, with those that wait; None where
                unknown.

        Raises:
            HarmfulFreezeError: it would have broken the training; everything is thawed then.
        """
        step, reason = self.recorder.step, self._reason_to_wait(saved_s)
        if reason:
            for decision in decisions:
                self.waiting.append(decision.module)
                name = self.modules[decision.module].name
                self.recorder.write(
                    FreezeWaits(step=step, module=decision.module, name=name, reason=reason)
                )
            return
        self.waiting = []
        self._freeze(decisions, batch)

    def thaw(self, decision: Thaw) -> None:
        """Thaw everything."""
        before, self.waiting = self.depth, []
        self._freezer.thaw()
        event = Thawed(
            step=self.recorder.step,
            frozen_before=before,
            reason=decision.reason,
            window=decision.window,
        )
        self.recorder.write(event)

    def restore(self, depth: int, decided_depth: int) -> None:
        """Return to a saved depth, without journaling decisions that were journaled before."""
        self._freeze_up_to(depth)
        self.waiting = list(range(self.decided_depth, decided_depth))
        self.put_in_force()

    def put_in_force(self) -> None:
        """Let the loop call the model as it is now; with several processes, only gradients of what
        trains are sent.
        """
        watch, hooks, is_alone = Stopwatch(), self.training.hooks, self.parallel.num_ranks == 1
        has_changed, self._depth_in_force = self._depth_in_force != self.depth, self.depth
        frozen = [name for module in self.modules[: self.depth] for name in module.submodules]
        self.parallel.update(frozen)
        check = self._check_before_forward if self.depth else None
        hooks.call_before(check, each=hooks.is_compiled or not is_alone)
        if not has_changed:
            return
        # Hooks do not fire in compiled code; units of shards have hooks of their own on what
        # crosses.
        looks = not (hooks.is_compiled or self.training.is_sharded or self._has_declined)
        frozen_modules = self.modules[: self.depth] if looks else ()
        self._gradients.follow(
            [self.training.model.get_submodule(module.tap) for module in frozen_modules]
        )
        self.compiling.note_change()
        if not is_alone:
            trained = [
                parameter
                for parameter in self.training.model.parameters()
                if parameter.requires_grad
            ]
            size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
            self.recorder.write(
                Rewrapped(step=self.recorder.step, wall_s=watch.read()[0], reduced_bytes=size_bytes)
            )

    def release(self) -> None:
        """Thaw everything without a decision, for good."""
        self._is_released = True
        self.waiting = []
        self._freezer.thaw()
        self.put_in_force()

    def prepare_step(self) -> None:
        """Cut gradients that nothing uses."""
        self._gradients.after_step()

    def describe(self) -> str:
        """Return what is frozen and what trains, as text that is the same wherever that is the
        same.
        """
        names = (
            name
            for name, parameter in self.training.model.named_parameters()
            if parameter.requires_grad
        )
        return f"{self.depth} {' '.join(names)}"

    def _reason_to_wait(self, saved_s: float | None) -> str:
        """Return why a freeze has to wait: compiling the model again would take longer than it
        saves; else nothing.
        """
        if not self.training.hooks.is_compiled:
            return ""
        reason = self.compiling.reason_to_wait(saved_s)
        does_wait = self.training.ranks.from_leader(Subject.GATE, reason is not None)
        return (reason or "the first process waits") if does_wait else ""

    def _check_before_forward(self) -> None:
        """Do what hooks of frozen layers cannot, and see whether the loop has gradients on of what
        is frozen.

        Among several processes that counts from their next meeting on: the others may not have
        switched them on.
        """
        self._was_overruled = self.is_undone
        if self._was_overruled and self.parallel.num_ranks > 1:
            self._freezer.hold()
        self._freezer.stay_in_inference_mode()

    def _freeze(self, decisions: Sequence[Freeze], batch: Batch | None) -> None:
        """Freeze layer modules, front to back; one by one only where all together would break the
        training.
        """
        if self._is_released:  # a callback for events has closed the run
            return
        modules = [self.modules[decision.module] for decision in decisions]
        before = None if batch is None else rehearse(self.training, modules, batch)
        depth = self.depth
        reached = [self._freeze_up_to(decision.module + 1) for decision in decisions]
        if batch is not None and before is not None:
            try:
                branch = self._find_fault(modules, before, batch)
            except Exception:  # such as a lack of memory: not rehearsed, not frozen
                self._return_to(depth)
                raise
            if branch is not None and len(decisions) > 1:
                self._return_to(depth)
                for decision in decisions:
                    self._freeze([decision], batch)
                return
            self._refuse(branch)
        for decision, module, (frozen, num_parameters) in zip(
            decisions, modules, reached, strict=True
        ):
            self.recorder.write(
                ModuleFrozen(
                    step=self.recorder.step,
                    module=decision.module,
                    name=module.name,
                    frozen=frozen,
                    reason=decision.reason,
                    parameter_share=num_parameters / max(1, self._num_trainable),
                )
            )

    def _freeze_up_to(self, depth: int) -> tuple[int, int]:
        """Freeze the front; return how many layer modules are frozen now, and how many of their
        elements.
        """
        self._freezer.freeze_to(depth, input_needs_grad=self.training.hooks.input_needs_grad)
        return self.depth, self._freezer.num_frozen

    def _return_to(self, depth: int) -> None:
        """Take back a freeze that nobody knows of yet."""
        self._freezer.thaw()
        self._freeze_up_to(depth)

    def _find_fault(
        self, modules: Sequence[LayerModule], before: Rehearsal, batch: Batch
    ) -> LayerModule | None:
        """Return a layer module that takes the gradient of an output; report a freeze that saves
        less than it could.
        """
        self._has_declined = False
        after = rehearse(self.training, modules, batch)
        branch = None if after is None else find_branch(modules, before, after)
        if (
            branch is None
            and after is not None
            and (batch.needs_grad or tree.requires_grad(after.boundaries[-1]))
        ):
            self._has_declined = True
            self._decline_saving(
                "its output still needs a gradient, because a trainable tensor outside the frozen "
                "layer modules "
                "(the input, or a parameter of another module) feeds it; the backward pass runs "
                "through it",
            )
        return branch

    def _refuse(self, branch: LayerModule | None) -> None:
        """Thaw everything and raise HarmfulFreezeError where an output has lost its gradient."""
        if branch is None:
            return
        self._freezer.thaw()
        raise HarmfulFreezeError(
            f"with {branch.name} frozen an output of the model would have no gradient left, "
            f"because it is a branch of its own and not in front of the others"
        )

    def _decline_saving(self, reason: str) -> None:
        if self.depth:
            self.recorder.decline(
                f"the full saving behind {self.modules[self.depth - 1].name}", reason
            )
