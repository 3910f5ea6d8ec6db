"""'forecast': freezing what would hardly change any more, by plasticity and the learning rate still to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from egeria.config import Config
from egeria.config.checks import require
from egeria.policy.bootstrap import Bootstrap
from egeria.policy.forecast.course import Course, longest_memory
from egeria.policy.forecast.guard import LossGuard
from egeria.policy.forecast.limit import STRICTER, limit_for
from egeria.policy.forecast.movement import LEAST_READINGS, Law, Movement
from egeria.policy.forecast.noise import Noise
from egeria.policy.forecast.rest import Rest
from egeria.policy.front import FrontPolicy
from egeria.policy.protocol import FORESIGHT, NOISE, PLASTICITY
from egeria.policy.schedules import UnfreezeRule
from egeria.policy.values import (
    BOOTSTRAPPING,
    KNOWLEDGE_GUIDED,
    Decision,
    EndBootstrapping,
    Interval,
    Judgement,
    Reading,
)

LAST_SHARE = 0.05
"""Share of the training at its end in which nothing is looked at any more: it could not repay the evaluations."""
UNFORESEEN = 10.0
"""Times the limit it froze under that a module would have to change by, as the rate to come looks now, to thaw."""


class Forecast(FrontPolicy):
    """Freezes the frontmost active module once what it would still change is too little to matter.

    Plasticity grows with the *way* since the snapshot (the learning rate, added up over the steps) by a power
    that readings of different age show. Followed over the way that the schedule still has ahead, that law says
    how far the module would come by the end of the run: what a freeze takes from it. Under `policy.limit` for
    `policy.patience` readings in a row, it freezes. A module may change by more where it has more than the average of
    the work, and where its steps hardly bear on the loss although the rate has fallen.

    Where a module only trembles around its place, the noise of its steps holds the loss up, and a rate that falls
    would let it down: from a frozen module it cannot. That part of the loss is measured too, and all that is
    frozen may keep no more than `policy.loss_limit` of the loss, or of its fall so far where that is more.

    At a constant high rate, plasticity is stationary but large: noise that is still to fade when the rate falls.
    Behind the last decay of a step schedule or late in a cosine the way is short, and in fine-tuning front
    modules hardly move at all. Where the rate does not come down, the limit is a tenth. Nothing freezes while
    the way ahead cannot be foreseen.

    A module that is far over its limit is looked at a third as often.

    Everything thaws when the training loss leaves its trend after a freeze, with a quarter of the limit from then
    on, and when the rate to come turns out so large that what is frozen would change by ten times its limit.

    Source: our own, from the observation that stationary plasticity at a high rate is the noise of SGD.

    Args:
        config: the settings of the run.
        trainable: for each layer module, front to back, whether it has any parameter to train.
        rule: not used.
        total_steps: optimizer steps of the run, None where unknown.
        deepest_freeze: at most this many front modules freeze; the last one never does.

    Raises:
        ConfigError: no reference is kept for long enough to see how a module moves.
    """

    needs = frozenset({PLASTICITY, NOISE, FORESIGHT})

    def __init__(
        self,
        config: Config,
        *,
        trainable: Sequence[bool],
        rule: UnfreezeRule,
        total_steps: int | None = None,
        deepest_freeze: int | None = None,
    ) -> None:
        super().__init__(config, trainable=trainable, rule=rule, total_steps=total_steps, deepest_freeze=deepest_freeze)
        kept = config.reference.refresh_evaluations
        require(
            kept is None or kept >= LEAST_READINGS,
            "reference.refresh_evaluations",
            f"at least {LEAST_READINGS} under the policy 'forecast', which needs as many readings against one",
            kept,
        )
        self._bootstrap = Bootstrap(change_threshold=config.bootstrapping.change_threshold)
        self._guard = LossGuard()
        self._strictness = 1.0
        """What the limit is multiplied by."""
        self._course = Course(memory=longest_memory(config), total_steps=total_steps)
        self._snapshot: int | None = None
        """Evaluation after which the snapshot was taken that the movement is measured from."""
        self._movement = Movement()
        self._laws: tuple[tuple[Law, float], ...] = ()
        """Of what is frozen, with the limit that it froze under."""
        self._noise = Noise()
        self._loss_given = 0.0
        """Share of the loss that what is frozen keeps from falling."""
        self._bearing_given = 0.0
        """Share of the loss that the noise of what is frozen made."""
        self._num_under = 0
        self._rest = Rest()

    @property
    def stage(self) -> str:  # type: ignore[override]
        """Either 'bootstrapping' or 'knowledge-guided'."""
        return KNOWLEDGE_GUIDED if self._bootstrap.is_over else BOOTSTRAPPING

    @property
    def window(self) -> int:
        """Evaluations that a snapshot is kept for: 1 while the modules settle and after a rest, for a new one."""
        begin, end = self._course.step - self._course.interval_steps, self._course.step
        is_renewed = self._course.settling or self._rest.ends_within(begin, end)
        return 1 if is_renewed else max(super().window, 2 * LEAST_READINGS)

    @property
    def limit(self) -> float:
        """Plasticity that an average module may still come to and yet freeze; smaller after an alarm."""
        return self._config.policy.limit * self._strictness

    @property
    def monitored(self) -> int | None:  # type: ignore[override]
        """The frontmost active module, or None: nothing can freeze any more, or nothing will for a while."""
        return None if self._course.step < self._rest.until else self._candidate

    @property
    def _candidate(self) -> int | None:
        """The next to freeze, or None: bootstrapping, nothing left to freeze, or no time to repay it."""
        is_late = self._total_steps is not None and self._course.step > (1 - LAST_SHARE) * self._total_steps
        return None if self.stage == BOOTSTRAPPING or is_late or self._frozen >= self._deepest else self._frozen

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Take in the loss, the way that was gone and the way ahead."""
        era_begins = self._course.go_on(interval)
        if era_begins:
            self._look_anew()
        self._noise = Noise() if self._course.settling else self._noise.observe(interval.noise, interval.loss)
        if era_begins or self._course.rose:  # both move the loss by themselves
            self._guard = LossGuard()
        if not self._bootstrap.is_over:
            return self._observe_bootstrapping(interval.loss)
        if interval.loss is not None:
            self._guard = self._guard.observe(interval.loss)
        reason = self._reason_to_thaw()
        return self._thaw(reason) if reason else self._pass_over_untrainable()

    def observe_reading(self, reading: Reading) -> Judgement:
        """Take in one reading; readings of a module no longer monitored change nothing."""
        way = self._course.way_since_snapshot(reading)
        if reading.module != self.monitored or reading.age is None or way is None:
            return Judgement(smoothed=reading.value)
        if reading.evaluation - reading.age != self._snapshot:
            self._snapshot, self._movement = reading.evaluation - reading.age, Movement()
        self._movement = self._movement.observe(way, reading.value)
        law = self._movement.law()
        change = self._course.change_ahead(law)
        loss = None if law is None else self._loss_ahead(law)
        limit = self._limit_for(reading)
        if change is not None:
            is_little = change < limit and (loss or 0.0) < self._config.policy.loss_limit
            self._num_under = self._num_under + 1 if is_little else 0
        if law is not None:
            self._rest_if_far(law, limit)
        stationary = self._num_under
        decisions: tuple[Decision, ...] = ()
        is_still = law is not None and change is not None and stationary >= self._config.policy.patience
        if law is not None and is_still and self._guard.is_ready:
            reason = f"to the end of the run its plasticity would come to {change:.1e} at most, under {limit:.1e}"
            reason += "" if loss is None else f", and all that is frozen keeps up {loss:.2%} of the loss or of its fall"
            decisions = self._freeze(law, limit, reason)
        return Judgement(
            smoothed=reading.value,
            tolerance=limit,
            change_ahead=change,
            loss_ahead=loss,
            stationary=stationary,
            decisions=decisions,
        )

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return the steps that the next freeze takes at least."""
        rest = max(0.0, self._rest.until - step)
        least = max(LEAST_READINGS, self._config.policy.patience)
        return None if self._candidate is None else rest + least * interval_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values."""
        return {
            **super().state_dict(),
            "bootstrap": asdict(self._bootstrap),
            "guard": self._guard.state_dict(),
            "movement": self._movement.state_dict(),
            "noise": self._noise.state_dict(),
            "rest": self._rest.state_dict(),
            "laws": [[asdict(law), limit] for law, limit in self._laws],
            "course": self._course.state_dict(),
            **{name: getattr(self, f"_{name}") for name in _PLAIN},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        self._bootstrap = Bootstrap(**state["bootstrap"])
        self._guard = LossGuard.from_state(state["guard"])
        self._movement = Movement.from_state(state["movement"])
        self._noise = Noise.from_state(state["noise"])
        self._rest = Rest.from_state(state["rest"])
        self._laws = tuple((Law(**law), limit) for law, limit in state["laws"])
        self._course.load_state_dict(state["course"])
        for name in _PLAIN:
            setattr(self, f"_{name}", state[name])

    def _observe_bootstrapping(self, loss: float | None) -> tuple[Decision, ...]:
        self._bootstrap = self._bootstrap.observe(loss)
        if not self._bootstrap.is_over:
            return ()
        reason = f"the loss changed by {self._bootstrap.change:.1%} in an interval"
        return (EndBootstrapping(reason=reason), *self._pass_over_untrainable())

    def _limit_for(self, reading: Reading) -> float:
        return limit_for(
            self.limit,
            work=None if reading.work_share is None else reading.work_share * len(self._trainable),
            bearing=self._bearing(),
            loss_limit=self._config.policy.loss_limit,
            has_fallen=self._course.has_fallen,
            comes_to_rest=self._course.comes_to_rest,
        )

    def _bearing(self) -> float | None:
        """Return the share of the loss that is noise of the frozen modules, as it was then, and of the next."""
        own = self._noise.share(self._frozen, self._bootstrap.previous_loss)
        return None if own is None else self._bearing_given + own

    def _loss_ahead(self, law: Law) -> float | None:
        """Return the share of the loss that freezing the monitored module too would keep from falling."""
        own = self._noise.share(self._frozen, self._bootstrap.previous_loss)
        return None if own is None else self._loss_given + own * law.stillness * self._course.rate_fall

    def _reason_to_thaw(self) -> str | None:
        if not self._frozen:
            return None
        excess = self._guard.excess
        if excess is not None:
            self._strictness *= STRICTER
            return f"the training loss came {excess:.1%} above its trend after a freeze"
        if self._course.way_ahead is None:
            return None
        if any(self._course.outgrows(law, UNFORESEEN * limit) for law, limit in self._laws):
            return f"the learning rate to come adds up to {self._course.way_ahead:.2g}, far more than was foreseen"
        return None

    def _thaw(self, reason: str) -> tuple[Decision, ...]:
        self._guard, self._laws, self._loss_given, self._bearing_given = LossGuard(), (), 0.0, 0.0
        self._course.settle()
        self._look_anew()
        return (*self._move_to(0, reason), *self._pass_over_untrainable())

    def _freeze(self, law: Law, limit: float, reason: str) -> tuple[Decision, ...]:
        loss, bearing = self._loss_ahead(law), self._bearing()
        self._look_anew()
        decisions = (*self._move_to(self._frozen + 1, reason), *self._pass_over_untrainable())
        if decisions:
            self._guard = self._guard.watch()
            self._laws = (*self._laws, (law, limit))
            self._loss_given = self._loss_given if loss is None else loss
            self._bearing_given = self._bearing_given if bearing is None else bearing
        return decisions

    def _look_anew(self) -> None:
        self._movement, self._num_under = Movement(), 0
        self._rest = Rest()

    def _rest_if_far(self, law: Law, limit: float) -> None:
        patience = self._config.policy.patience
        self._rest = self._rest.observe(self._course.change_in_sight(law), limit, patience)
        if self._rest.num_far >= patience:
            steps = self.window * self._course.interval_steps
            self._rest = self._rest.begin(self._course.step, steps, self._total_steps)
            self._movement = Movement()
            self._course.forget()

    def _pass_over_untrainable(self) -> tuple[Decision, ...]:
        depth = self._frozen
        while depth < self._deepest and not self._trainable[depth]:
            depth += 1
        return self._move_to(depth, "it has no parameters to train")


_PLAIN = ("strictness", "snapshot", "num_under", "loss_given", "bearing_given")
"""Attributes that are saved as they are."""
