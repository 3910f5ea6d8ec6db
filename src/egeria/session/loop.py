"""What happens at each step of the user's loop: intervals, evaluations, decisions, and failures of
ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import Tensor

from egeria.errors import StateError
from egeria.events import ModulesOrdered, PlanMade, StageChanged
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule, count_trainable, parameters_of
from egeria.layers.undisturbed import CommunicationError
from egeria.parallel import COMPILED_SHARDS
from egeria.policy import (
    BOOTSTRAPPING,
    KNOWLEDGE_GUIDED,
    PLASTICITY,
    Decision,
    EndBootstrapping,
    Freeze,
    PlanPolicy,
    Policy,
    Thaw,
)
from egeria.report.freezing import backward_shares
from egeria.session.applying import in_groups
from egeria.session.checks import MakeController
from egeria.session.compiling import Compiling
from egeria.session.cutting import Cut, deepest_by_gradients
from egeria.session.following import UNDONE, HarmfulFreezeError, Training, check_calls, watch_order
from egeria.session.interval import IntervalMeter
from egeria.session.parts import CutParts, PartsMaker
from egeria.session.ranks import LostError, OutOfStepError
from egeria.session.skipping import COMPILED, begin_skipping
from egeria.session.steps import StepCounter
from egeria.session.timing import Budget, IntervalClock, IterationTimer

POLLS_PER_INTERVAL = (
    4  # how often several processes ask each other for readings of a controller process
)
FAULTS_BEFORE_GIVING_UP = 3


class Session:
    """Counts the steps of a run, and evaluates, freezes and thaws between them.

    None of it may stop or change the user's training: a failure is journaled and, if it repeats,
    everything thaws.

    Args:
        training: what is trained.
        cut: of the model into layer modules; None for one that is only watched.
        interval_steps: `n` at the beginning.
        make_policy: makes the policy for a cut.
        make_controller: makes the controller for the layer modules of a cut; may ask how many
            seconds are left.
        loader: of the user; with the cache its samples are followed.
    """

    def __init__(
        self,
        training: Training,
        *,
        cut: Cut | None,
        interval_steps: int,
        make_policy: Callable[[Cut], Policy],
        make_controller: MakeController,
        loader: Any,
    ) -> None:
        self.training, self.ranks, self.recorder = training, training.ranks, training.recorder
        self.timer, self.clock = (
            IterationTimer(training.total_steps),
            IntervalClock(interval_steps=interval_steps),
        )
        self.compiling = Compiling(training.hooks, self.recorder)
        self.budget = Budget(
            training.config.controller.budget_share, training.config.plasticity.window
        )
        self.skipping = begin_skipping(training, loader, self.timer.take_out) if cut else None
        """Skips the frozen forward pass; None leaves it as it is."""
        self._maker = PartsMaker(
            training,
            make_policy,
            make_controller,
            self.compiling,
            self.budget,
            self.timer,
            lambda: self.clock,
        )
        self.parts = self._maker.make(cut) if cut else None
        self.modules = cut.modules if cut else ()
        """The layer modules, front to back; kept after the parts are released."""
        self.plan = training.plan(self.modules) if cut else None
        """What the policy follows; None where that is no plan."""
        self.meter = IntervalMeter(training, self.timer)
        self.steps = StepCounter(training, self.meter, self.timer.take_out)
        """Tells which calls of `run.step` count."""
        self._is_cut_to_order = False
        self._order = (
            watch_order(self.training, self.modules, again=self._is_cut_to_order)
            if self.parts
            else None
        )
        """Records the execution order until the first forward pass has shown it."""
        self._past_controller_cpu_s, self._faults_in_a_row = 0.0, dict[str, int]()
        self.training.hooks.when_compiled(self._note_compiled)
        self.compiling.make_room(len(self.modules))
        if self.parts is None:
            self.ranks.part()
        elif self.plan is not None and self.plan.freezes:
            self._guard("preparing an evaluation", self._arm)

    @property
    def controller_cpu_s(self) -> float:
        """CPU seconds of controller processes so far."""
        return self._past_controller_cpu_s + (
            self.parts.evaluation.status.cpu_s if self.parts else 0.0
        )

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen now."""
        return self.parts.applier.depth if self.parts else 0

    @property
    def stage(self) -> str:
        """The stage of the policy."""
        return self.parts.policy.stage if self.parts else BOOTSTRAPPING

    def step(self, loss: Any) -> None:
        """Take in one optimizer step, with its loss as `steps.take` returned it."""
        self.meter.add(loss)
        ends_interval = self.clock.tick()
        self.recorder.step = self.clock.step
        seconds = self.compiling.look(self.clock.step)
        self.timer.add_overhead(seconds, seconds)
        if self.parts is not None and self.training.hooks.needs_check:
            self._guard(
                "following the calls of the model", partial(check_calls, self.training, self._order)
            )
        if self._order is not None:
            self._guard("ordering the layer modules", self._settle_order)
        if self.clock.step == 1 and self.plan is not None:
            self._guard("announcing the plan", self._announce_plan)
        if ends_interval or self._may_have_readings:
            self.ranks.meet(self.clock.step)
            if self._may_have_readings:
                self._guard("taking in readings", self._take_in_readings)
            if ends_interval:
                self._guard("ending an interval", self._end_interval)
                self.meter.end_interval()
            if self.parts is not None and self.ranks.meets:
                self._guard("agreeing on what is frozen", self._agree)
        self._prepare_step()

    def close(self) -> None:
        """Leave the model and the loader as they were found, for good."""
        self._release()
        self.steps.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of everything that decides."""
        state: dict[str, Any] = {
            **asdict(self.clock),
            **self.meter.state_dict(),
            "accumulation": self.steps.state_dict(),
            "budget": self.budget.state_dict(),
            "policy_name": self.training.policy_name,
            "norms": dict(self.training.norms),
            "engine": None,
        }
        if self.parts is not None:
            state["engine"] = {
                "modules": [module.to_dict() for module in self.modules],
                "cut_by": asdict(self.training.config.modules),
                **self.parts.state_dict(),
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; StateError where it belongs to another model or policy, and
        nothing has changed.
        """
        saved, budget, counted = state["engine"], state["budget"], state["accumulation"]
        measured = {name: state[name] for name in ("losses", "held_losses", "iteration_s")}
        clock = IntervalClock.from_state(state)
        modules = (
            None
            if saved is None
            else tuple(LayerModule.from_dict(entry) for entry in saved["modules"])
        )
        is_needed = self.parts is not None and bool(
            clock.step or self.clock.step
        )  # else nothing was decided
        self.training.check_state(state["policy_name"], modules if is_needed else None)
        if modules is None:
            self._release()
        elif not self.modules:
            raise StateError(
                "A run's state fits the model it was saved from; that one was cut into layer "
                "modules, and this one is "
                "not. Attach the same model with the same configuration, then load."
            )
        elif self.parts is None:
            self.recorder.decline(
                "freezing", "it has ended for good in this run, also where that is rolled back"
            )
        elif is_needed:
            parts, cut = self._maker.resume(modules, saved, state["norms"])
            self._release_parts(parts)
            cut.announce(self.training, clock.step, self.modules, saved["cut_by"])
            self.parts, self.modules = parts, modules
            parts.restore(saved)
            self._keep_plan(parts.policy)
            self._is_cut_to_order = clock.step > 0
            self._order = watch_order(self.training, self.modules, again=self._is_cut_to_order)
        self.budget.load_state_dict(budget)
        self.clock, self.recorder.step = clock, clock.step
        if self.skipping is not None:
            self.skipping.count_from(clock.step)
        self.meter.load_state_dict(measured)
        self.steps.load_state_dict(counted)
        self._prepare_step()

    def _keep_plan(self, policy: Policy) -> None:
        """Show the plan of a resumed policy, which goes on with that of its beginning."""
        if isinstance(policy, PlanPolicy) and str(policy.plan) != str(self.plan):
            names = tuple(module.name for module in self.modules)
            self.plan = replace(policy.plan, modules=names, reason="the run began with it")

    @property
    def _may_have_readings(self) -> bool:
        """Whether to poll for readings at this step: whenever one may come; among several processes
        a few times.
        """
        if self.parts is None or self.ranks.is_lost:
            return False
        if self.ranks.is_alone:
            return (
                self.parts.evaluation.status.is_asynchronous
                and not self.parts.evaluation.has_given_up
            )
        return self.ranks.leader_is_apart and self.clock.is_at_part(POLLS_PER_INTERVAL)

    def _end_interval(self) -> None:
        rate, parts = self.training.learning_rate(self.modules), self.parts
        interval = self.meter.take(self.clock, self.modules, self.frozen, rate)
        if parts is None or self.ranks.is_lost:
            return
        if parts.applier.is_undone:
            raise HarmfulFreezeError(UNDONE)
        evaluation, decisions = parts.evaluation, parts.policy.observe_interval(interval)
        freezes = any(isinstance(decision, Freeze) for decision in decisions)
        batch = None
        if freezes and PLASTICITY not in parts.policy.needs:
            evaluation.profile()
            batch = evaluation.batch  # to rehearse on what no reading led to
        self._apply(parts, decisions, batch)
        if any(isinstance(decision, EndBootstrapping) for decision in decisions):
            self.clock.interval_steps = evaluation.begin(
                self.clock.evaluation, self.clock.interval_steps
            )
        elif interval.loss is not None:
            self._evaluate(parts)
        evaluation.disarm()

    def _evaluate(self, parts: CutParts) -> None:
        """Request an evaluation, take in finished ones, and refresh the reference model if that is
        due.
        """
        clock, evaluation, monitored = self.clock, parts.evaluation, parts.policy.monitored
        if monitored is None:
            return
        if requests := self.ranks.leads and not evaluation.has_given_up:
            evaluation.request(clock.evaluation, monitored)
        self._take_in_readings()
        if requests:
            evaluation.refresh(clock.evaluation)
            clock.interval_steps = evaluation.fit_interval(
                clock.interval_steps, parts.policy.monitored
            )

    def _take_in_readings(self) -> None:
        """Apply what the policy decides on finished readings."""
        parts = self.parts
        if parts is not None and not parts.applier.is_undone:
            for decisions in parts.evaluation.judge():
                self._apply(parts, decisions, parts.evaluation.evaluated)

    def _apply(self, parts: CutParts, decisions: Sequence[Decision], batch: Batch | None) -> None:
        """Carry out decisions in order; `_agree` puts them in force at the end of the step."""
        for decision, freezes in in_groups(decisions):
            if self.parts is not parts:  # a callback for events has closed the run
                return
            if freezes:
                modules = [*parts.applier.waiting, *(freeze.module for freeze in freezes)]
                parts.applier.freeze(freezes, batch, parts.evaluation.saved_s(modules))
            elif isinstance(decision, Thaw):
                parts.applier.thaw(decision)
                parts.evaluation.valid_from = (
                    self.clock.evaluation
                )  # what was requested earlier is from before
            else:
                self.recorder.write(
                    StageChanged(
                        step=self.clock.step, stage=KNOWLEDGE_GUIDED, reason=decision.reason
                    )
                )

    def _agree(self) -> None:
        """Check that the same is frozen in all processes, and put it in force."""
        assert self.parts is not None
        applier = self.parts.applier
        if not self.ranks.is_alone:
            self.clock.interval_steps = self.ranks.close(
                applier.describe(), self.clock.interval_steps
            )
        applier.put_in_force()

    def _prepare_step(self) -> None:
        if self.parts is not None:
            self._guard("preparing the next step", self.parts.applier.prepare_step)
        self.timer.frozen = self.frozen
        self._guard("preparing an evaluation", self._arm)
        self._guard("moving the boundary of the cache", self._move_cache_boundary)

    def _announce_plan(self) -> None:
        """Journal the plan, with the share of the compute that it skips where that is known."""
        if self.plan is None or self.parts is None or not self.ranks.leads:
            return
        skipped = 0.0 if not self.plan.freezes else None
        if self.plan.freezes and (shares := self.parts.evaluation.profile()) is not None:
            own = parameters_of(self.training.model, self.modules)
            trained = [count_trainable(part) / max(1, sum(map(Tensor.numel, part))) for part in own]
            skipped = self.plan.skipped_share(backward_shares(shares, trained))
        self.recorder.write(
            PlanMade(
                step=self.clock.step,
                plan=str(self.plan),
                reason=self.plan.reason,
                skipped_share=skipped,
            )
        )
        if not self.clock.next_step_ends:
            self.parts.evaluation.disarm()

    def _arm(self) -> None:
        """Keep the batch of the next step where an interval ends with that, and the first one where
        the plan is to tell what it skips.
        """
        self.training.hooks.looks_at_input |= self.clock.next_step_ends
        evaluation = self.parts.evaluation if self.parts else None
        announces = self.clock.step == 0 and self.plan is not None and self.plan.freezes
        if (
            evaluation
            and (self.clock.next_step_ends or announces)
            and self.ranks.leads
            and not evaluation.has_given_up
        ):
            evaluation.arm()

    def _settle_order(self) -> None:
        """Cut the model again if its first forward pass ran in another order than
        it is defined in.
        """
        seen = self._order.record() if self._order else None
        if seen is None:
            return
        self._order = None
        if self._is_cut_to_order:  # in a resumed run, which may be checkpointed in another way now
            deepest, reason = deepest_by_gradients(self.modules, seen)
            if self.parts and deepest < self.parts.applier.deepest_freeze:
                raise HarmfulFreezeError(reason)
            return
        cut = Cut.in_order(self.training, seen)
        if cut != Cut.of(self.training, self.modules):
            batch = self.parts.evaluation.batch if self.parts and self.plan else None
            self.parts, self.modules = self._maker.make(cut), cut.modules
            self.parts.evaluation.batch = batch  # by which the plan tells what it skips
            self.plan = self.training.plan(self.modules)
            self.recorder.write(ModulesOrdered(step=self.clock.step, **cut.to_dict()))

    def _move_cache_boundary(self) -> None:
        if self.skipping is not None and self.parts is not None:
            self.skipping.follow(self.modules[: self.frozen], self.parts.policy, self.clock)

    def _end_skipping(self) -> None:
        skipping, self.skipping = self.skipping, None
        if skipping is not None:
            skipping.close()

    def _note_compiled(self) -> None:
        self._guard("preparing for compiled calls", self._prepare_for_compiled_calls)

    def _prepare_for_compiled_calls(self) -> None:
        if self.skipping is not None:
            self.skipping.refuse(COMPILED)
        if self.parts is not None and self.training.is_sharded:
            self._stop_freezing(COMPILED_SHARDS)
            return
        self.compiling.make_room(len(self.modules))
        if self._order is not None:
            self._order.close()
            self._order = watch_order(self.training, self.modules, again=self._is_cut_to_order)

    def _release(self) -> None:
        """Leave the model as it was found, for good."""
        self.compiling.close()
        self.ranks.part()
        self._release_parts()
        self._guard("closing the cache", self._end_skipping)
        self.training.hooks.close()

    def _release_parts(self, successor: CutParts | None = None) -> None:
        if self._order is not None:
            self._order.close()
            self._order = None
        parts, self.parts = self.parts, None
        if parts is None:
            return
        if self.skipping is not None:
            leave = partial(self.skipping.follow, (), parts.policy, self.clock)
            self._guard("leaving the boundary of the cache", leave)
        self._guard("thawing", parts.applier.release)
        keeps = (
            successor is not None and successor.evaluation.controller is parts.evaluation.controller
        )
        self._guard(
            "closing the controller", partial(parts.evaluation.close, keeps_controller=keeps)
        )
        self._past_controller_cpu_s += parts.evaluation.status.cpu_s

    def _guard(self, what: str, action: Callable[[], object]) -> None:
        """Run one of our own steps so that nothing it raises reaches the user's loop."""
        try:
            try:
                action()
                self._faults_in_a_row.pop(what, None)
            except (OutOfStepError, LostError):
                raise
            except (HarmfulFreezeError, CommunicationError) as error:
                self._stop_freezing(str(error))
            except Exception as error:
                self._count_fault(what, error)
        except OutOfStepError as error:
            self._release()
            self.recorder.decline("freezing", str(error))
        except LostError as error:  # to thaw alone would part this process from the others
            self.recorder.decline("freezing and thawing any further", str(error))

    def _count_fault(self, what: str, error: Exception) -> None:
        self.recorder.fault(what, error)
        count = self._faults_in_a_row[what] = self._faults_in_a_row.get(what, 0) + 1
        if (parts := self.parts) is None:
            return
        parts.evaluation.disarm()
        differs = parts.policy.frozen != parts.applier.decided_depth
        if differs or count >= FAULTS_BEFORE_GIVING_UP or self.ranks.are_meeting:
            self._stop_freezing(f"{what} failed {count} times in a row, last with: {error}")

    def _stop_freezing(self, reason: str) -> None:
        """Thaw for good; among several processes at the same step as the others, by what `leave`
        raises in all.
        """
        if self.ranks.is_alone:
            self._release()
        self.recorder.decline("freezing", reason, by_this_process=True)
        self.ranks.leave()
