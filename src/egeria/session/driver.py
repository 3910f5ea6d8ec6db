"""Counting steps and keeping the parts in time: losses, policy, evaluator, applier."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from egeria.errors import StateError
from egeria.layers.modules import LayerModule
from egeria.layers.shards import is_sharded
from egeria.parallel import COMPILED_SHARDS
from egeria.policy import BOOTSTRAPPING, PLASTICITY, Annealing, EndBootstrapping, Thaw
from egeria.session.clock import IntervalClock
from egeria.session.engine import Engine, EngineBuilder
from egeria.session.faults import Faults
from egeria.session.judge import Judge
from egeria.session.meter import IntervalMeter
from egeria.session.ordering import Ordering
from egeria.session.pace import Pace
from egeria.session.rates import Wanted
from egeria.session.recorder import Recorder
from egeria.session.skipping import COMPILED, Skipping

LOOKS_PER_INTERVAL = 4
"""How often several processes ask each other for readings of a controller process."""


class Driver:
    """Runs the parts of a session, step by step.

    Nothing it does may stop or change the user's training: a failure is journaled and, if it keeps
    happening, the driver thaws everything and only measures from then on.

    Args:
        builder: makes the parts.
        modules: the cut of the model; empty for one that is only watched.
        interval_steps: `n`.
        recorder: where everything is told.
        pace: measures the iterations.
        skipping: skips the frozen forward pass; None leaves it as it is.
    """

    def __init__(
        self,
        *,
        builder: EngineBuilder,
        modules: tuple[LayerModule, ...],
        interval_steps: int,
        recorder: Recorder,
        pace: Pace,
        skipping: Skipping | None = None,
    ) -> None:
        self._clock = IntervalClock(interval_steps)
        self._builder = builder
        self._ranks = builder.ranks
        self._engine: Engine | None = builder.build(modules) if modules else None
        self._ordering = Ordering(builder, modules, recorder) if modules else None
        self._recorder = recorder
        self.pace = pace
        self._skipping = skipping
        policy = self._engine.policy if self._engine else None
        self._meter = IntervalMeter(pace, builder.measures(policy, pace.take_out), self._ranks, recorder)
        self._rates = builder.rates(policy, self._wanted_rates, pace.take_out)
        self._compiling = builder.compiling
        self._judge = Judge(builder)
        self._past_controller_cpu_s = 0.0
        self._modules = modules
        builder.handle.when_compiled(self._note_compiled)
        self._compiling.make_room(len(modules))
        if not modules:
            self._ranks.part()
        self._faults = Faults(self._ranks, recorder, weakref.proxy(self))

    @property
    def engine(self) -> Engine | None:
        """What judges and freezes; None where nothing can be frozen, or not any more."""
        return self._engine

    @property
    def num_steps(self) -> int:
        """Optimizer steps done so far."""
        return self._clock.num_steps

    @property
    def controller_cpu_s(self) -> float:
        """CPU seconds of controller processes so far."""
        return self._past_controller_cpu_s + (self._engine.evaluator.controller_cpu_s if self._engine else 0.0)

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen now."""
        return self._engine.applier.freezer.depth if self._engine else 0

    @property
    def modules(self) -> tuple[LayerModule, ...]:
        """The layer modules, front to back; still there after `release`."""
        return self._engine.modules if self._engine else self._modules

    @property
    def stage(self) -> str:
        """The stage of the policy."""
        return self._engine.policy.stage if self._engine else BOOTSTRAPPING

    def step(self, loss: Any) -> None:
        """Take in one optimizer step.

        Raises:
            ConfigError: the loss is no number; nothing has been counted then.
        """
        self._meter.add(loss)
        ends_interval = self._clock.tick()
        self._recorder.step = self.num_steps
        seconds = self._compiling.look(self.num_steps)
        self.pace.add_overhead(seconds, seconds)
        if self._ordering is not None and self._ordering.is_open:
            self._faults.bear("ordering the layer modules", self._settle_order)
        if ends_interval or self._may_have_readings:
            self._meet(ends_interval)
        self._faults.bear("preparing an evaluation", self._arm)
        self._faults.bear("moving the boundary of the cache", self._follow_boundary)

    def close(self) -> None:
        """Leave the model and the loader as they were found, for good."""
        self.release()
        self._faults.bear("closing the cache", self._end_skipping)

    def release(self, successor: Engine | None = None) -> None:
        """Leave the model as it was found and stop for good, or until a successor takes over."""
        if self._ordering is not None:
            self._ordering.close()
        if successor is None:
            self._meter.close()
            self._compiling.close()
            if self._rates is not None:
                self._rates.close()
            self._ranks.part()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            self._modules = engine.modules
            if self._skipping is not None:
                self._faults.bear("leaving the boundary of the cache", self._skipping.rest)
            engine.applier.release()
            try:
                engine.evaluator.close(successor.evaluator if successor else None)
                self._past_controller_cpu_s += engine.evaluator.controller_cpu_s
            except Exception as error:
                self._recorder.fault("closing the controller", error)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of everything that decides."""
        state: dict[str, Any] = {
            **self._clock.state_dict(),
            **self._meter.state_dict(),
            "rates": self._rates.state_dict() if self._rates else {},
            "budget": self._judge.state_dict(),
            "policy_name": self._builder.policy_name,
            "engine": None,
        }
        if self._engine is not None:
            state["engine"] = {
                "modules": [module.to_dict() for module in self._engine.modules],
                "policy": self._engine.policy.state_dict(),
                "evaluator": self._engine.evaluator.state_dict(),
                "frozen": self._engine.applier.freezer.depth,
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            StateError: it belongs to another model or policy; nothing has changed then.
        """
        saved, budget = state["engine"], dict(state["budget"])
        gathered = {name: state[name] for name in ("losses", "iteration_s")} | {"measures": state.get("measures", {})}
        self._builder.check_policy_name(state.get("policy_name", "egeria"))
        clock = IntervalClock(1)
        clock.load_state_dict(state)
        if saved is None:
            self.release()
        elif self._engine is None:
            raise StateError(
                "A run's state fits the model it was saved from; that one was cut into layer modules, and this one is "
                "not, or its run is closed. Attach the same model with the same configuration, then load."
            )
        elif clock.num_steps:  # before the first step nothing was decided, and the order is still to be seen
            modules = tuple(LayerModule.from_dict(entry) for entry in saved["modules"])
            self._builder.check(modules)
            engine = self._builder.build(modules)
            engine.policy.load_state_dict(saved["policy"])
            engine.evaluator.load_state_dict(saved["evaluator"])
            self.release(engine)
            self._engine = engine
            frozen = engine.policy.frozen
            engine.applier.restore(min(frozen, int(saved.get("frozen", frozen))), frozen)
        self._judge.load_state_dict(budget)
        self._clock = clock
        self._recorder.step = clock.num_steps
        self._meter.load_state_dict(gathered)
        if self._rates is not None:
            self._rates.load_state_dict(state.get("rates", {}))
        self._faults.bear("preparing an evaluation", self._arm)
        self._faults.bear("moving the boundary of the cache", self._follow_boundary)

    @property
    def _may_have_readings(self) -> bool:
        """Tell whether to look for readings at this step: whenever they may come, among several processes at times."""
        if self._engine is None or self._ranks.is_lost:
            return False
        if self._ranks.is_alone:
            return self._engine.evaluator.is_waiting
        return self._ranks.leader_is_apart and self._clock.is_at_part(LOOKS_PER_INTERVAL)

    def _meet(self, ends_interval: bool) -> None:
        """Let all processes of the job judge the same and freeze the same, at this step."""
        self._ranks.meet(self.num_steps)
        if self._may_have_readings:
            self._faults.bear("taking in readings", self._take_in_readings)
        if ends_interval:
            self._faults.bear("ending an interval", self._end_interval)
        if self._engine is not None and self._ranks.meets:
            self._faults.bear("agreeing on what is frozen", self._agree)

    def _agree(self) -> None:
        assert self._engine is not None
        applier = self._engine.applier
        if not self._ranks.is_alone:
            self._clock.interval_steps = self._ranks.close(applier.trained(), self._clock.interval_steps)
        applier.settle()

    def _settle_order(self) -> None:
        if self._ordering is not None and self._engine is not None:
            self._engine = self._ordering.settle(self._engine, self.num_steps)

    def _end_interval(self) -> None:
        rate = self._builder.learning_rate(self.modules)
        interval = self._meter.take(self._clock, self.modules, self.frozen, rate)
        engine = self._engine
        if engine is None or self._ranks.is_lost:
            return
        if engine.applier.is_undone:
            self.release()
            reason = "the loop itself switched gradients of frozen layers on (requires_grad), and it has the last word"
            self._recorder.decline("freezing", reason)
            return
        self._judge.iteration_s = self._meter.iteration_s
        decisions = engine.policy.observe_interval(interval)
        engine.applier.apply(self.num_steps, decisions, self._judge.batch_for(engine, decisions), self._judge.waits)
        if any(isinstance(decision, Thaw) for decision in decisions):
            engine.evaluator.void_before(self._clock.evaluation)
        if any(isinstance(decision, EndBootstrapping) for decision in decisions):
            self._judge.refresh(engine, self._clock.evaluation)
        elif interval.loss is not None:
            self._judge.evaluate(engine, self._clock)
        engine.evaluator.disarm()

    def _wanted_rates(self) -> Wanted | None:
        """Return the rates that the policy wants for the step to come, where it has any say in that."""
        if self._engine is None or not isinstance(self._engine.policy, Annealing):
            return None
        shares = self._engine.policy.rate_shares(self.num_steps)
        return None if shares is None else (self._engine.modules, shares)

    def _follow_boundary(self) -> None:
        if self._skipping is not None and self._engine is not None:
            self._skipping.follow(self._engine, self.num_steps, self._clock.interval_steps)

    def _take_in_readings(self) -> None:
        if self._engine is not None and not self._engine.applier.is_undone:
            self._judge.take_in_readings(self._engine)

    def _arm(self) -> None:
        engine = self._engine
        if engine is None or not self._clock.next_step_ends or engine.evaluator.has_given_up or not self._ranks.leads:
            return
        monitored = engine.policy.monitored
        if monitored is not None:
            engine.evaluator.arm(monitored, engine.modules[monitored])
        elif engine.policy.stage == BOOTSTRAPPING or PLASTICITY not in engine.policy.needs:
            engine.evaluator.arm(None, None)  # a batch to calibrate the first reference on, or to rehearse a freeze on

    def _note_compiled(self) -> None:
        self._faults.bear("getting ready for compiled calls", self._get_ready_for_compiled_calls)

    def _get_ready_for_compiled_calls(self) -> None:
        if self._end_skipping():
            self._recorder.decline("skipping the frozen forward pass", COMPILED)
        if self._engine is not None and is_sharded(self._builder.model):
            self._faults.stop_freezing(COMPILED_SHARDS)
            return
        self._compiling.make_room(len(self.modules))
        if self._ordering is not None:
            self._ordering.begin_again()

    def _end_skipping(self) -> bool:
        skipping, self._skipping = self._skipping, None
        if skipping is not None:
            skipping.close()
        return skipping is not None
