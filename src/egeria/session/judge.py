"""Judging: an evaluation at the end of an interval, its reading whenever that comes, and what both cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from egeria.events import ComputeProfiled, IntervalChanged, PlasticityRead
from egeria.layers.batch import Batch
from egeria.layers.plain import gather
from egeria.layers.shards import is_sharded
from egeria.policy import PLASTICITY, Decision, Freeze, Reading
from egeria.session.budget import Budget, count_iterations
from egeria.session.clock import IntervalClock
from egeria.session.compiling import BACKWARD_SHARE
from egeria.session.engine import Engine, EngineBuilder
from egeria.session.pace import Stopwatch
from egeria.session.ranks import Subject


class Judge:
    """Asks for evaluations, hands readings to the policy and its decisions to the applier.

    Among several processes the first asks, and all hear the answers.

    Args:
        builder: what the session is made from.
    """

    def __init__(self, builder: EngineBuilder) -> None:
        self.iteration_s = 0.0
        """Seconds of an iteration with nothing frozen; 0 where that is not known yet."""
        config = builder.config
        self._refresh_evaluations = config.reference.refresh_evaluations
        self._window = config.reference.refresh_evaluations or config.plasticity.window
        self._budget = Budget(config.controller.budget_share, config.plasticity.window)
        self._model = builder.model
        self._is_sharded = is_sharded(builder.model)
        self._ranks = builder.ranks
        self._compiling = builder.compiling
        self._total_steps = builder.total_steps
        self._recorder = builder.recorder
        self._profiled = False
        self._work_shares: Sequence[float] | None = None

    def evaluate(self, engine: Engine, clock: IntervalClock) -> None:
        """Ask for an evaluation, take in what is finished, refresh the reference if that is due."""
        monitored = engine.policy.monitored
        if monitored is None:
            return
        asks = self._ranks.leads and not engine.evaluator.has_given_up
        if asks:
            self._profile(engine)
            watch = Stopwatch()
            asked = engine.evaluator.evaluate(clock.num_steps, clock.evaluation, monitored, engine.modules[monitored])
            if asked and self.iteration_s > 0:
                self._budget.note_evaluation(watch.read()[0] / self.iteration_s)
        self.take_in_readings(engine)
        if asks or self._is_sharded:
            self._refresh_in_time(engine, clock)
        if asks:
            self._keep_to_the_budget(engine, clock)

    def refresh(self, engine: Engine, evaluation: int, period: int = 0) -> bool:
        """Bring the reference up to date after `period` evaluations, or at once; return whether it was.

        Raises:
            OutOfStepError: the processes of the job do not agree.
            LostError: they cannot reach each other.
        """
        leads = self._ranks.leads
        is_due = leads and engine.evaluator.is_due(period)
        if self._is_sharded:  # what is in parts is put together by all
            is_due = bool(self._ranks.from_leader(Subject.REFRESH, [float(is_due)])[0])
        if not is_due:
            return False
        model = gather(self._model, keeps=leads)
        return leads and engine.evaluator.refresh(evaluation, model)

    def take_in_readings(self, engine: Engine) -> None:
        """Judge what the controller has finished, at this evaluation or since an earlier one."""
        for reading in self._finished(engine):
            if reading.module != engine.policy.monitored:
                engine.evaluator.drop_late(reading)
                continue
            decisions = self._judge(engine, reading)
            engine.applier.apply(self._recorder.step, decisions, engine.evaluator.evaluated, self.waits)

    def batch_for(self, engine: Engine, decisions: Sequence[Decision]) -> Batch | None:
        """Return a batch to rehearse freezes on that no reading led to; None where there are none."""
        if PLASTICITY in engine.policy.needs or not any(isinstance(decision, Freeze) for decision in decisions):
            return None
        self._profile(engine)
        return engine.evaluator.batch

    def waits(self, modules: Sequence[int]) -> str | None:
        """Return why layer modules are not to freeze yet: to compile the model anew would take longer than it saves.

        Raises:
            OutOfStepError: the processes of the job do not agree.
            LostError: they cannot reach each other.
        """
        if not self._compiling.is_on:
            return None
        saved_s = None
        if self._work_shares is not None and self._total_steps is not None and self.iteration_s > 0:
            share = BACKWARD_SHARE * sum(self._work_shares[module] for module in modules)
            saved_s = share * self.iteration_s * (self._total_steps - self._recorder.step)
        reason = self._compiling.reason_to_wait(saved_s)
        [does_wait] = self._ranks.from_leader(Subject.GATE, [float(reason is not None)])
        return (reason or "the first process waits") if does_wait else None

    def _finished(self, engine: Engine) -> list[Reading]:
        """Return what is finished, the same in all processes."""
        own = [] if engine.evaluator.has_given_up else engine.evaluator.poll()
        if self._work_shares is not None:
            own = [replace(reading, work_share=self._work_shares[reading.module]) for reading in own]
        if self._ranks.is_alone:
            return own
        shared = self._ranks.readings(own)
        return own or shared

    def _refresh_in_time(self, engine: Engine, clock: IntervalClock) -> None:
        watch = Stopwatch()
        period = self._refresh_evaluations or engine.policy.window
        if self.refresh(engine, clock.evaluation, period) and self.iteration_s > 0:
            # A policy may ask for some in a row; what counts is how often they come in the long run.
            self._budget.note_refresh(watch.read()[0] / self.iteration_s, max(period, self._window))

    def _judge(self, engine: Engine, reading: Reading) -> Sequence[Decision]:
        judgement = engine.policy.observe_reading(reading)
        self._recorder.write(
            PlasticityRead(
                step=self._recorder.step,
                evaluation=reading.evaluation,
                module=reading.module,
                name=engine.modules[reading.module].name,
                value=reading.value,
                smoothed=judgement.smoothed,
                slope=judgement.slope,
                tolerance=judgement.tolerance,
                stationary=judgement.stationary,
                wall_s=reading.wall_s,
                cpu_s=reading.cpu_s,
                controller_cpu_s=reading.controller_cpu_s,
                age=reading.age,
                work_share=reading.work_share,
                change_ahead=judgement.change_ahead,
                loss_ahead=judgement.loss_ahead,
            )
        )
        return judgement.decisions

    def state_dict(self) -> dict[str, Any]:
        """Return what the budget knows."""
        return self._budget.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._budget.load_state_dict(state)

    def _keep_to_the_budget(self, engine: Engine, clock: IntervalClock) -> None:
        before, monitored, looked_at = clock.interval_steps, engine.policy.monitored, engine.evaluator.share_of_samples
        changed = None
        if monitored is not None and self._work_shares is not None and looked_at is not None:
            counted = count_iterations(sum(self._work_shares[: monitored + 1]), looked_at)
            changed = self._budget.expect(counted, before)
        changed = changed or self._budget.review(before)
        if changed is not None:
            clock.interval_steps, reason = changed
            event = IntervalChanged(step=clock.num_steps, before=before, after=clock.interval_steps, reason=reason)
            self._recorder.write(event)

    def _profile(self, engine: Engine) -> None:
        """Count the forward pass' operations, once; a model that cannot be counted is reported without them."""
        batch = engine.evaluator.batch
        if self._profiled or batch is None:
            return
        self._profiled = True
        self._work_shares = engine.applier.forward_shares(batch)
        if self._work_shares is not None:
            self._recorder.write(ComputeProfiled(step=self._recorder.step, forward_shares=list(self._work_shares)))
