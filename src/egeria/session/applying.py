"""Carrying out what the policy decides: the only code that freezes or thaws, or lets modules rest
at a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from egeria import tree
from egeria.events import FreezeWaits, ModuleFrozen, PeriodsChanged, Rewrapped, Thawed
from egeria.layers.batch import Batch
from egeria.layers.freezing import Freezer
from egeria.layers.gradients import InputGradients
from egeria.layers.modules import LayerModule, count_trainable, parameters_of
from egeria.layers.resting import DutyCycle
from egeria.policy import Decision, Freeze, SetPeriods, Thaw
from egeria.session.following import HarmfulFreezeError, Training
from egeria.session.landing import Decided, Landing
from egeria.session.measuring.compiling import Compiling
from egeria.session.measuring.timing import Stopwatch
from egeria.session.ranks import Subject
from egeria.session.rehearsing import Rehearsal, find_branch, rehearse


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


BACKWARD_SHARE = 2 / 3
"""Of an iteration: the backward pass has two multiplications where the forward pass has one."""


@dataclass(eq=False)
class Applier:
    """Turns decisions into frozen layers and journal events; `put_in_force` makes them effective
    for the loop.
    """

    training: Training
    modules: Sequence[LayerModule]
    compiling: Compiling
    deepest_freeze: int
    """The largest number of front layer modules that may be frozen, or rest at a step."""
    landing: Landing
    """Of what was decided to freeze; by default there is none."""
    trainable: Sequence[bool]
    """Whether each layer module had anything to train in the beginning: what had nothing is its
    owner's to unfreeze."""

    def __post_init__(self) -> None:
        self.recorder, self.parallel = self.training.recorder, self.training.parallel
        freezes_tied = self.training.config.freezing.tied == "freeze"
        self._freezer = Freezer(
            self.training.model,
            self.modules,
            freeze_tied=freezes_tied,
            trainable=tuple(self.trainable),
        )
        self._duty = DutyCycle(self.training.model, self.modules, freezes_tied)
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
        self._thawed = (0, -1)
        """How many front layer modules thawed last, and at which step."""

    @property
    def depth(self) -> int:
        """How many front layer modules are frozen."""
        return self._freezer.depth

    @property
    def periods(self) -> tuple[int, ...]:
        """For each layer module, how many optimizer steps lie between its updates."""
        return self._duty.periods

    @property
    def resting(self) -> int:
        """How many front layer modules are not updated at the step to come,
        frozen ones included.
        """
        return max(self.depth, self._duty.depth)

    @property
    def decided_depth(self) -> int:
        """How many front layer modules were decided to freeze, those included that wait or land."""
        return max([self.depth, *(module + 1 for module in (*self.waiting, *self.landing.decided))])

    @property
    def num_landing(self) -> int:
        """How many layer modules land behind the frozen ones."""
        return max(0, self.landing.depth - self.depth)

    @property
    def is_undone(self) -> bool:
        """Whether the loop switched gradients on again of a layer that is frozen, or rests."""
        return self._was_overruled or self._freezer.is_undone or self._duty.is_undone

    def freeze(
        self, decisions: Sequence[Freeze], batch: Batch | None, saved_s: float | None
    ) -> None:
        """Freeze more layer modules at once, or let them land first, or wait.

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
        found = [
            Decided(module=decision.module, reason=decision.reason, step=step)
            for decision in decisions
        ]
        num_thawed, at = self._thawed
        self._land_or_freeze(found, batch, num_landed=num_thawed if at == step else 0)

    def land(self, batch: Batch | None) -> None:
        """Freeze what has landed at the end of an interval, and begin to land what waited for that.

        Args:
            batch: a training batch to rehearse the freeze on.

        Raises:
            HarmfulFreezeError: it would have broken the training; everything is thawed then.
        """
        self._freeze(self.landing.finish(), batch)
        self._land_or_freeze(self.landing.take_queue(), batch)

    def thaw(self, decision: Thaw) -> None:
        """Thaw everything."""
        before, self.waiting = self.depth, []
        self._thawed = before, self.recorder.step
        self.landing.cancel(decision.reason)
        self._duty.end()
        self._freezer.thaw()
        event = Thawed(
            step=self.recorder.step,
            frozen_before=before,
            reason=decision.reason,
            window=decision.window,
        )
        self.recorder.write(event)

    def set_periods(self, decision: SetPeriods, batch: Batch | None, saved_s: float | None) -> None:
        """Have layer modules updated at other steps, unless that cannot be done or does not repay
        compiling.

        Args:
            decision: what the policy decided.
            batch: a training batch to rehearse the steps on at which some of them rest.
            saved_s: seconds that it saves to the end of the run; None where unknown.

        Raises:
            HarmfulFreezeError: it would have broken the training; everything is thawed then.
        """
        allowed = zip(decision.periods, self.modules, strict=True)
        periods = [
            period if index < self.deepest_freeze else 1
            for index, (period, _) in enumerate(allowed)
        ]
        self._begin_periods(periods)
        num_depths = len(self._duty.depths(self.depth))
        refusal = (
            self.parallel.periods_refusal() or self._reason_to_wait(saved_s, num_depths)
            if num_depths
            else ""
        )
        if refusal:
            self._duty.end()
            self.recorder.decline("updating front layer modules at some steps only", refusal)
        elif batch is not None:
            self._rehearse_rest(batch)
        step, is_in_force = self.recorder.step, not refusal
        event = PeriodsChanged(
            step=step, periods=periods, reason=decision.reason, is_in_force=is_in_force
        )
        self.recorder.write(event)

    def restore(
        self, depth: int, decided_depth: int, periods: Sequence[int], landing: Mapping[str, Any]
    ) -> None:
        """Return to a saved depth, periods and landing, without journaling decisions that were
        journaled before.
        """
        self._freeze_up_to(depth)
        self._begin_periods(periods)
        self.landing.load_state_dict(landing)
        self.waiting = list(range(self.decided_depth, decided_depth))
        self.put_in_force()

    def put_in_force(self) -> None:
        """Let the loop call the model as it is now; with several processes, only gradients of what
        trains are sent.
        """
        watch, hooks, is_alone = Stopwatch(), self.training.hooks, self.parallel.num_ranks == 1
        has_changed, self._depth_in_force = self._depth_in_force != self.depth, self.depth
        frozen = [name for module in self.modules[: self.depth] for name in module.submodules]
        self._duty.wake()
        self.parallel.update(frozen, self._duty.depths(self.depth))
        changes, each = self.depth > 0 or self._duty.is_active, hooks.is_compiled or not is_alone
        is_watched = changes or self.landing.is_under_way
        each = each or self.landing.is_under_way
        hooks.call_before(self._check_before_forward if is_watched else None, each=each)
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
        self.landing.cancel(None)
        self._duty.end()
        self._freezer.thaw()
        self.put_in_force()

    def prepare_step(self, step: int) -> None:
        """Let that rest which is not to be updated at the step to come, and cut gradients that
        serve nobody.
        """
        self._gradients.after_step()
        if self._duty.rest_at(step):
            self.parallel.rest(self._duty.depth)
            self.compiling.note_rest(self._duty.depth)

    def describe(self) -> str:
        """Return what is frozen and what trains, as text that is the same wherever that is the
        same.
        """
        names = (
            name
            for name, parameter in self.training.model.named_parameters()
            if parameter.requires_grad
        )
        return f"{self.depth} {self.periods} {self.landing.describe()} {' '.join(names)}"

    def _reason_to_wait(self, saved_s: float | None, num_graphs: int = 1) -> str:
        """Return why a freeze has to wait: compiling the model again would take longer than it
        saves; else nothing.
        """
        if not self.training.hooks.is_compiled:
            return ""
        reason = self.compiling.reason_to_wait(saved_s, num_graphs)
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
            self._duty.hold()
        self._freezer.stay_in_inference_mode()
        self.landing.before_forward()

    def _land_or_freeze(
        self, found: Sequence[Decided], batch: Batch | None, num_landed: int = 0
    ) -> None:
        """Begin to land what is to land; freeze the rest, and the `num_landed` front modules,
        frozen until now.
        """
        at_once: list[Decided] = []
        if found:
            self._duty.wake()
        for decided in found:
            if self._is_released:  # a callback for events has closed the run
                return
            if decided.module < num_landed or not self.landing.takes(
                decided, self.depth + len(at_once)
            ):
                at_once.append(decided)
        if not self._is_released:
            self._freeze(at_once, batch)

    def _freeze(self, found: Sequence[Decided], batch: Batch | None) -> None:
        """Freeze layer modules, front to back; one by one only where all together would break the
        training.
        """
        if not found:
            return
        self._duty.wake()
        modules = [self.modules[decided.module] for decided in found]
        before = None if batch is None else rehearse(self.training, modules, batch)
        depth, reached = self.depth, [self._freeze_up_to(decided.module + 1) for decided in found]
        if batch is not None and before is not None:
            try:
                branch = self._find_fault(modules, before, batch)
            except Exception:  # such as a lack of memory: not rehearsed, not frozen
                self._return_to(depth)
                raise
            if branch is not None and len(found) > 1:
                self._return_to(depth)
                for decided in found:
                    if not self._is_released:
                        self._freeze([decided], batch)
                return
            self._refuse(branch)
        self._begin_periods(self.periods)
        for decided, module, (frozen, num_parameters) in zip(found, modules, reached, strict=True):
            self.recorder.write(
                ModuleFrozen(
                    step=self.recorder.step,
                    module=decided.module,
                    name=module.name,
                    frozen=frozen,
                    reason=decided.reason,
                    parameter_share=num_parameters / max(1, self._num_trainable),
                    decided_at=decided.step if decided.is_journaled else None,
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

    def _begin_periods(self, periods: Sequence[int]) -> None:
        self._duty.begin(periods, self.depth, input_needs_grad=self.training.hooks.input_needs_grad)

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

    def _rehearse_rest(self, batch: Batch) -> None:
        """Refuse periods by which an output has no gradient at some steps."""
        for depth in self._duty.depths(self.depth):
            modules = [self.modules[depth - 1]]
            before = rehearse(self.training, modules, batch)
            with self._duty.trial(depth):
                after = before and rehearse(self.training, modules, batch)
            if before is not None and after is not None:
                self._refuse(find_branch(modules, before, after))

    def _refuse(self, branch: LayerModule | None) -> None:
        """Thaw everything and raise HarmfulFreezeError where an output has lost its gradient."""
        if branch is None:
            return
        self._duty.end()
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
