"""What happens at each step of the user's loop: intervals, evaluations, decisions, and failures of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from egeria.errors import StateError
from egeria.events import IntervalChanged, ModulesOrdered, PlasticityRead, StageChanged
from egeria.journal.recorder import Recorder
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.parallel import COMPILED_SHARDS
from egeria.policy import (
    BOOTSTRAPPING,
    KNOWLEDGE_GUIDED,
    PLASTICITY,
    Annealing,
    Decision,
    EndBootstrapping,
    Freeze,
    Policy,
    Thaw,
)
from egeria.session.applying import Applier
from egeria.session.compiling import Compiling
from egeria.session.evaluation import Evaluation
from egeria.session.following import Cut, ExecutionOrder, HarmfulFreezeError, Training
from egeria.session.meter import IntervalMeter
from egeria.session.ranks import LostError, OutOfStepError, Ranks
from egeria.session.rates import LayerRates, Wanted
from egeria.session.skipping import COMPILED, Skipping
from egeria.session.timing import Budget, IntervalClock

POLLS_PER_INTERVAL = 4  # how often several processes ask each other for readings of a controller process
FAULTS_BEFORE_GIVING_UP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CutParts:
    """What is made for one cut of the model into layer modules."""

    modules: tuple[LayerModule, ...]
    policy: Policy
    evaluation: Evaluation
    applier: Applier


class Session:
    """Counts the steps of a run, and evaluates, freezes and thaws between them.

    None of it may stop or change the user's training: a failure is journaled and, if it repeats, everything thaws.

    Args:
        training: what the user trains.
        parts: for the first cut; None for a model that is only watched.
        make_parts: makes those of another cut, where the model runs in another order or a state is loaded.
        interval_steps: `n`.
        ranks: the processes of the job, seen from this one.
        recorder: writes the journal.
        meter: measures intervals, and times their iterations.
        compiling: what freezing costs a compiled model.
        budget: what evaluations may cost.
        skipping: skips the frozen forward pass; None leaves it as it is.
    """

    def __init__(
        self,
        training: Training,
        parts: CutParts | None,
        make_parts: Callable[[Cut], CutParts],
        *,
        interval_steps: int,
        ranks: Ranks,
        recorder: Recorder,
        meter: IntervalMeter,
        compiling: Compiling,
        budget: Budget,
        skipping: Skipping | None,
    ) -> None:
        self.timer = meter.timer
        self.modules = parts.modules if parts else ()
        """The layer modules, front to back; kept after `release`."""
        self._training = training
        self._parts = parts
        self._make_parts = make_parts
        self._clock = IntervalClock(interval_steps)
        self._ranks = ranks
        self._recorder = recorder
        self._meter = meter
        self._compiling = compiling
        self._budget = budget
        self._skipping = skipping
        self._rates: LayerRates | None = None
        if parts is not None and isinstance(parts.policy, Annealing):
            self._rates = LayerRates(training, self._wanted_rates, recorder, self.timer.take_out)
        self._order = ExecutionOrder(training, self.modules, recorder) if parts else None
        self._past_controller_cpu_s = 0.0
        self._faults_in_a_row: dict[str, int] = {}
        training.handle.when_compiled(self._note_compiled)
        compiling.make_room(len(self.modules))
        if parts is None:
            ranks.part()

    @property
    def num_steps(self) -> int:
        """Optimizer steps done so far."""
        return self._clock.num_steps

    @property
    def controller_cpu_s(self) -> float:
        """CPU seconds of controller processes so far."""
        return self._past_controller_cpu_s + (self._parts.evaluation.controller_cpu_s if self._parts else 0.0)

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen now."""
        return self._parts.applier.depth if self._parts else 0

    @property
    def stage(self) -> str:
        """The stage of the policy."""
        return self._parts.policy.stage if self._parts else BOOTSTRAPPING

    def step(self, loss: Any) -> None:
        """Take in one optimizer step.

        Raises:
            ConfigError: the loss is no number; nothing has been counted then.
        """
        self._meter.add(loss)
        ends_interval = self._clock.tick()
        self._recorder.step = self.num_steps
        seconds = self._compiling.look(self.num_steps)
        self.timer.add_overhead(seconds, seconds)
        if self._order is not None and self._order.is_open:
            self._guard("ordering the layer modules", self._settle_order)
        if ends_interval or self._may_have_readings:
            self._ranks.meet(self.num_steps)
            if self._may_have_readings:
                self._guard("taking in readings", self._take_in_readings)
            if ends_interval:
                self._guard("ending an interval", self._end_interval)
            if self._parts is not None and self._ranks.meets:
                self._guard("agreeing on what is frozen", self._agree)
        self._guard("preparing an evaluation", self._arm)
        self._guard("moving the boundary of the cache", self._move_cache_boundary)

    def close(self) -> None:
        """Leave the model and the loader as they were found, for good."""
        self.release()
        self._guard("closing the cache", self._end_skipping)

    def release(self, successor: CutParts | None = None) -> None:
        """Leave the model as it was found and stop for good, or until a successor takes over."""
        if self._order is not None:
            self._order.close()
        if successor is None:
            self._meter.close()
            self._compiling.close()
            if self._rates is not None:
                self._rates.close()
            self._ranks.part()
        parts, self._parts = self._parts, None
        if parts is None:
            return
        if self._skipping is not None:
            self._guard("leaving the boundary of the cache", self._skipping.rest)
        parts.applier.release()
        try:
            parts.evaluation.close(successor.evaluation if successor else None)
            self._past_controller_cpu_s += parts.evaluation.controller_cpu_s
        except Exception as error:
            self._recorder.fault("closing the controller", error)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of everything that decides."""
        state: dict[str, Any] = {
            **self._clock.state_dict(),
            **self._meter.state_dict(),
            "rates": self._rates.state_dict() if self._rates else {},
            "budget": self._budget.state_dict(),
            "policy_name": self._training.policy_name,
            "engine": None,
        }
        if self._parts is not None:
            state["engine"] = {
                "modules": [module.to_dict() for module in self.modules],
                "policy": self._parts.policy.state_dict(),
                "evaluator": self._parts.evaluation.state_dict(),
                "frozen": self.frozen,
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            StateError: it belongs to another model or policy; nothing has changed then.
        """
        saved, budget = state["engine"], dict(state["budget"])
        measured = {name: state[name] for name in ("losses", "iteration_s")} | {"measures": state.get("measures", {})}
        clock = IntervalClock.from_state(state)
        modules = None if saved is None else tuple(LayerModule.from_dict(entry) for entry in saved["modules"])
        known = modules if clock.num_steps and self._parts else None
        self._training.check_state(state.get("policy_name", "egeria"), known)
        if modules is None:
            self.release()
        elif self._parts is None:
            raise StateError(
                "A run's state fits the model it was saved from; that one was cut into layer modules, and this one is "
                "not, or its run is closed. Attach the same model with the same configuration, then load."
            )
        elif clock.num_steps:  # before the first step nothing was decided, and the order is still to be recorded
            parts = self._make_parts(Cut.of(self._training, modules))
            parts.policy.load_state_dict(saved["policy"])
            parts.evaluation.load_state_dict(saved["evaluator"])
            self.release(parts)
            self._parts, self.modules = parts, modules
            decided = parts.policy.frozen
            parts.applier.restore(min(decided, int(saved.get("frozen", decided))), decided)
        self._budget.load_state_dict(budget)
        self._clock = clock
        self._recorder.step = clock.num_steps
        self._meter.load_state_dict(measured)
        if self._rates is not None:
            self._rates.load_state_dict(state.get("rates", {}))
        self._guard("preparing an evaluation", self._arm)
        self._guard("moving the boundary of the cache", self._move_cache_boundary)

    @property
    def _may_have_readings(self) -> bool:
        """Whether to poll for readings at this step: whenever one may come; among several processes a few times."""
        if self._parts is None or self._ranks.is_lost:
            return False
        if self._ranks.is_alone:
            return self._parts.evaluation.is_waiting
        return self._ranks.leader_is_apart and self._clock.is_at_part(POLLS_PER_INTERVAL)

    def _end_interval(self) -> None:
        interval = self._meter.take(self._clock, self.modules, self.frozen, self._training.learning_rate(self.modules))
        parts = self._parts
        if parts is None or self._ranks.is_lost:
            return
        if parts.applier.is_undone:
            self.release()
            reason = "the loop itself switched gradients of frozen layers on (requires_grad), and it has the last word"
            self._recorder.decline("freezing", reason)
            return
        parts.evaluation.iteration_s = self._meter.iteration_s
        decisions = parts.policy.observe_interval(interval)
        batch = None
        if PLASTICITY not in parts.policy.needs and any(isinstance(decision, Freeze) for decision in decisions):
            parts.evaluation.profile()
            batch = parts.evaluation.batch  # to rehearse freezes on that no reading led to
        self._apply(parts, decisions, batch)
        if any(isinstance(decision, Thaw) for decision in decisions):
            parts.evaluation.discard_before(self._clock.evaluation)
        if any(isinstance(decision, EndBootstrapping) for decision in decisions):
            parts.evaluation.refresh(self._clock.evaluation)
        elif interval.loss is not None:
            self._evaluate(parts)
        parts.evaluation.disarm()

    def _evaluate(self, parts: CutParts) -> None:
        """Request an evaluation, take in finished ones, and refresh the reference model if that is due."""
        clock, evaluation, monitored = self._clock, parts.evaluation, parts.policy.monitored
        if monitored is None:
            return
        if requests := self._ranks.leads and not evaluation.has_given_up:
            evaluation.request(clock.num_steps, clock.evaluation, monitored)
        self._take_in_readings()
        if requests or self._training.is_sharded:
            period = self._training.config.reference.refresh_evaluations or parts.policy.window
            evaluation.refresh(clock.evaluation, period)
        changed = evaluation.fit_interval(clock.interval_steps, parts.policy.monitored) if requests else None
        if changed is not None:
            before, (after, reason) = clock.interval_steps, changed
            clock.interval_steps = after
            self._recorder.write(IntervalChanged(step=self.num_steps, before=before, after=after, reason=reason))

    def _take_in_readings(self) -> None:
        """Give finished readings to the policy, and apply what it decides."""
        parts = self._parts
        if parts is None or parts.applier.is_undone:
            return
        for reading in parts.evaluation.poll():
            if reading.module != parts.policy.monitored:
                reason = "it came late: the layer module is no longer monitored, or not now"
                parts.evaluation.drop(reading.evaluation, reading.module, reason)
                continue
            judgement = parts.policy.observe_reading(reading)
            shown = asdict(reading) | asdict(judgement) | {"step": self.num_steps}
            del shown["decisions"]
            self._recorder.write(PlasticityRead(name=self.modules[reading.module].name, **shown))
            self._apply(parts, judgement.decisions, parts.evaluation.evaluated)

    def _apply(self, parts: CutParts, decisions: Sequence[Decision], batch: Batch | None) -> None:
        """Carry out decisions in order; `_agree` puts them in force at the end of the step."""
        for decision in decisions:
            if isinstance(decision, Freeze):
                together = [*parts.applier.waiting, decision.module]
                parts.applier.freeze(decision, batch, parts.evaluation.saved_s(together, self.num_steps))
            elif isinstance(decision, Thaw):
                parts.applier.thaw(decision)
            else:
                reason = decision.reason
                self._recorder.write(StageChanged(step=self.num_steps, stage=KNOWLEDGE_GUIDED, reason=reason))

    def _agree(self) -> None:
        """Check that all processes have frozen the same, and put it in force."""
        assert self._parts is not None
        applier = self._parts.applier
        if not self._ranks.is_alone:
            self._clock.interval_steps = self._ranks.close(applier.describe(), self._clock.interval_steps)
        applier.put_in_force()

    def _arm(self) -> None:
        """Keep the batch of the next step where an interval ends with that."""
        parts = self._parts
        if parts is None or not self._clock.next_step_ends or not self._ranks.leads or parts.evaluation.has_given_up:
            return
        monitored = parts.policy.monitored
        # Also without a monitored module: to calibrate the first reference on, or to rehearse a freeze on.
        if monitored is not None or parts.policy.stage == BOOTSTRAPPING or PLASTICITY not in parts.policy.needs:
            parts.evaluation.arm(monitored)

    def _settle_order(self) -> None:
        """Cut the model again if its first forward pass ran in another order than it is defined in."""
        cut = self._order.record() if self._order else None
        if cut is not None and cut != Cut.of(self._training, self.modules):
            self._parts, self.modules = self._make_parts(cut), cut.modules
            self._recorder.write(ModulesOrdered(step=self.num_steps, **cut.to_dict()))

    def _wanted_rates(self) -> Wanted | None:
        """Return the learning rates that the policy wants for the coming step, if it sets them."""
        policy = self._parts.policy if self._parts else None
        shares = policy.rate_shares(self.num_steps) if isinstance(policy, Annealing) else None
        return None if shares is None else (self.modules, shares)

    def _move_cache_boundary(self) -> None:
        if self._skipping is not None and self._parts is not None:
            frozen = self.modules[: self.frozen]
            self._skipping.follow(frozen, self._parts.policy, self.num_steps, self._clock.interval_steps)

    def _end_skipping(self) -> None:
        skipping, self._skipping = self._skipping, None
        if skipping is not None:
            skipping.close()

    def _note_compiled(self) -> None:
        self._guard("preparing for compiled calls", self._prepare_for_compiled_calls)

    def _prepare_for_compiled_calls(self) -> None:
        if self._skipping is not None:
            self._end_skipping()
            self._recorder.decline("skipping the frozen forward pass", COMPILED)
        if self._parts is not None and self._training.is_sharded:
            self._stop_freezing(COMPILED_SHARDS)
            return
        self._compiling.make_room(len(self.modules))
        if self._order is not None:
            self._order.watch()

    def _guard(self, what: str, action: Callable[[], object]) -> None:
        """Run one of our own steps so that nothing it raises reaches the user's loop."""
        try:
            try:
                action()
                self._faults_in_a_row.pop(what, None)
            except (OutOfStepError, LostError):
                raise
            except HarmfulFreezeError as error:
                self._stop_freezing(str(error))
            except Exception as error:
                self._count_fault(what, error)
        except OutOfStepError as error:
            self.release()
            self._recorder.decline("freezing", str(error))
        except LostError as error:  # to thaw alone would part this process from the others
            self._recorder.decline("freezing and thawing any further", str(error))

    def _count_fault(self, what: str, error: Exception) -> None:
        self._recorder.fault(what, error)
        count = self._faults_in_a_row[what] = self._faults_in_a_row.get(what, 0) + 1
        parts = self._parts
        if parts is None:
            return
        parts.evaluation.disarm()
        differs = parts.policy.frozen != parts.applier.decided_depth
        if differs or count >= FAULTS_BEFORE_GIVING_UP or self._ranks.are_meeting:
            self._stop_freezing(f"{what} failed {count} times in a row, last with: {error}")

    def _stop_freezing(self, reason: str) -> None:
        """Thaw for good; among several processes at the same step as the others, by what `leave` raises in all."""
        if self._ranks.is_alone:
            self.release()
        self._recorder.decline("freezing", reason, by_this_process=True)
        self._ranks.leave()
