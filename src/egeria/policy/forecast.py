"""'forecast': freezing what would hardly change any more, by plasticity and the learning rate still
to come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from egeria.config.checks import require
from egeria.policy.base import BootstrappedPolicy
from egeria.policy.evidence import (
    ERA_FALL,
    LEAST_READINGS,
    SETTLING,
    LearningRateHistory,
    LossGuard,
    Movement,
    NoiseHistory,
    PowerLaw,
)
from egeria.policy.protocol import (
    BOOTSTRAPPING,
    FORESIGHT,
    NOISE,
    PLASTICITY,
    Decision,
    Interval,
    Judgement,
    Reading,
)

LAST_SHARE = 0.05
"""Share of the training at its end in which nothing is evaluated any more: it could not repay the
evaluations."""
UNFORESEEN = 10.0
"""Times the limit it froze under that a module would have to change by, by the rate to come as
known now, to thaw."""
FAR = 10.0  # times the limit: from there a predicted change is far from it
LONGEST_PAUSE = 0.08
"""Share of the training that a pause takes at most: a short one has few evaluations, and its
windows are long."""
STRICTER = 0.25
"""Factor on the limit after an alarm of the guard, and where the noise of steps cannot be
measured."""
STILL_LEARNING = 0.1
"""Factor where the rate stays high to the end: what moves is still learning. In a short translation
run modules that would have changed by 1 % of the similarities took 1 to 2 % of the loss with
them."""
LARGEST_WEIGHT = 2.0  # largest factor for a module with much work
LARGEST_EASE = 4.0
"""Largest factor for a module whose steps hardly affect the loss, once the rate has fallen. In a
segmentation run four of five modules could be frozen with 3 % to change, and nothing was lost:
their noise was 0.3 % of the loss. At a high rate small noise means that a module has hardly begun
to learn: 0.002 % where ResNet-50 stood still at a seventh of its training, and lost two points by
the freeze."""


class Forecast(BootstrappedPolicy):
    """Freezes the frontmost active module once what it would still change is too little to matter.

    Plasticity grows with the rate sum since the snapshot (the learning rate, summed over the steps)
    by a power that readings of different age show. Followed over the rate sum of the steps still to
    come, that law predicts how far the module would move by the end of the run: what a freeze takes
    from it. Under `policy.limit` for `policy.patience` readings in a row, it freezes.

    Where a module only fluctuates around its place, the noise of its steps keeps the loss up, and a
    rate that falls would let it down: from a frozen module it cannot. That part of the loss is
    measured too, and all that is frozen may keep no more than `policy.loss_limit` of what was
    learned: of the fall of the loss so far.

    Nothing freezes while the rate to come is unknown. Everything thaws when the training loss
    leaves its trend after a freeze, and when the rate to come turns out far larger than was
    foreseen.

    Source: our own, from the observation that stationary plasticity at a high rate is the noise of
    SGD.
    """

    needs: frozenset[str] = frozenset({PLASTICITY, NOISE, FORESIGHT})
    _own = ("guard", "movement", "noise", "pause", "strictness", "snapshot", "num_under")
    _saved = (*BootstrappedPolicy._saved, *_own, "frozen_loss", "frozen_noise", "laws", "rates")

    def _prepare(self) -> None:
        super()._prepare()
        kept = self._config.reference.refresh_evaluations
        require(
            kept is None or kept >= LEAST_READINGS,
            "reference.refresh_evaluations",
            f"at least {LEAST_READINGS} under the policy 'forecast', which needs as many readings "
            "against one",
            kept,
        )
        self._guard = LossGuard()
        self._strictness = 1.0  # factor on the limit
        longest = kept or max(self._config.plasticity.window, 2 * LEAST_READINGS)
        memory = 2 * longest + self._config.controller.queue_length
        self._rates = LearningRateHistory(memory=memory, total_steps=self._total_steps)
        self._snapshot: int | None = (
            None  # the evaluation after which the one was taken that readings are against
        )
        self._movement = Movement()
        self._laws: tuple[
            tuple[PowerLaw, float], ...
        ] = ()  # of the frozen modules, with the limits they froze under
        self._noise = NoiseHistory()
        self._frozen_loss = 0.0  # what the frozen modules keep up of the loss
        self._frozen_noise = 0.0  # what their noise made of it
        self._num_under = 0
        self._pause = EvaluationPause()

    @property
    def window(self) -> int:
        """Evaluations that a snapshot is kept for: 1 while the modules settle and after a pause,
        for a new one.
        """
        begin, end = self._rates.step - self._rates.interval_steps, self._rates.step
        is_renewed = self._rates.settling or begin < self._pause.until <= end
        return 1 if is_renewed else max(super().window, 2 * LEAST_READINGS)

    @property
    def monitored(self) -> int | None:
        """The frontmost active module, or None: nothing can freeze yet or any more, or nothing will
        for a while.
        """
        return None if self._rates.step < self._pause.until else self._candidate

    @property
    def _candidate(self) -> int | None:
        return self._frozen if self._may_freeze and not self._is_too_early else None

    @property
    def _may_freeze(self) -> bool:
        return (
            self.stage != BOOTSTRAPPING and self._is_early and self._frozen < self._deepest_freeze
        )

    @property
    def _is_early(self) -> bool:
        """Whether a freeze could still repay what it costs."""
        return self._total_steps is None or self._rates.step <= (1 - LAST_SHARE) * self._total_steps

    @property
    def _is_too_early(self) -> bool:
        return self._rates.has_more_ahead(self._config.policy.watched_share)

    def _needed(self) -> frozenset[str]:
        return Forecast.needs - {NOISE} if self._is_too_early else Forecast.needs

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Update the loss, the noise and the rates, and thaw where they ask for it."""
        era_begins = self._rates.update(interval)
        if era_begins:
            self._restart_readings()
        if self._is_too_early:  # a pause, behind which the snapshot is renewed
            self._pause = EvaluationPause(until=self._rates.step + 1)
        self.needs = self._needed()
        self._noise = (
            NoiseHistory()
            if self._rates.settling
            else self._noise.observe(interval.noise, interval.loss)
        )
        self._guard = self._guard.in_force(interval.frozen)
        if era_begins or self._rates.rose:  # both move the loss by themselves
            self._guard = LossGuard(awaited=self._guard.awaited)
        if self.stage == BOOTSTRAPPING:
            return self._observe_bootstrapping(interval.loss)
        if interval.loss is not None:
            self._guard = self._guard.observe(interval.loss)
        reason = self._reason_to_thaw()
        return self._thaw(reason) if reason else self._pass_over_untrainable()

    def observe_reading(self, reading: Reading) -> Judgement:
        """Update the law of the monitored module; readings of another module change nothing."""
        rate_sum = self._rates.rate_sum_since_snapshot(reading)
        if reading.module != self.monitored or reading.age is None or rate_sum is None:
            return Judgement(smoothed=reading.value)
        if reading.evaluation - reading.age != self._snapshot:
            self._snapshot, self._movement = reading.evaluation - reading.age, Movement()
        self._movement = Movement(samples=(*self._movement.samples, (rate_sum, reading.value)))
        law, limit = self._movement.law(), self._limit_for(reading)
        change = self._rates.change_ahead(law)
        ahead = None if law is None else self._loss_ahead(law)
        loss = None if ahead is None else self._share_of_learned(ahead)
        if change is not None:
            is_little = change < limit and (loss or 0.0) < self._config.policy.loss_limit
            self._num_under = self._num_under + 1 if is_little else 0
        if law is not None:
            self._pause_if_far(law, limit)
        num_under = self._num_under
        decisions: tuple[Decision, ...] = ()
        is_still = num_under >= self._config.policy.patience and self._guard.is_ready
        if law is not None and change is not None and is_still:
            reason = (
                f"to the end of the run its plasticity would come to {change:.1e} at most, "
                f"under {limit:.1e}"
            )
            reason += (
                ""
                if loss is None
                else f", and all that is frozen keeps up {loss:.2%} of the fall of the loss"
            )
            decisions = self._freeze(law, limit, reason)
        return Judgement(
            smoothed=reading.value,
            tolerance=limit,
            change_ahead=change,
            loss_ahead=loss,
            stationary=num_under,
            decisions=decisions,
        )

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return the least number of steps until the next freeze."""
        paused = max(0.0, self._pause.until - step)
        least = max(LEAST_READINGS, self._config.policy.patience)
        return paused + least * interval_steps if self._may_freeze else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        super().load_state_dict(state)
        self.needs = self._needed()
        self._laws = tuple((PowerLaw(**law), limit) for law, limit in state["laws"])

    def _limit_for(self, reading: Reading) -> float:
        """Return the plasticity that the module of a reading may still reach, and yet freeze."""
        limit, own = self._config.policy.limit * self._strictness, self._noise.of(self._frozen)
        if reading.work_share is not None:
            # A module with more work than the average saves more by the same change. One with less
            # has no stricter limit, since it also keeps those after it from freezing.
            limit *= min(LARGEST_WEIGHT, max(1.0, reading.work_share * len(self._trainable)))
        noise_share = None if own is None else self._share_of_learned(self._frozen_noise + own)
        has_fallen = self._rates.rate * ERA_FALL <= self._rates.largest_rate
        if noise_share is None:
            limit *= STRICTER
        elif (
            noise_share > 0 and has_fallen
        ):  # 0 where steps went up their own gradients: it shows nothing
            limit *= min(LARGEST_EASE, max(1.0, self._config.policy.loss_limit / noise_share))
        return limit if self._rates.ends_low else STILL_LEARNING * limit

    def _share_of_learned(self, loss: float) -> float:
        return self._noise.share_of_learned(loss, self._bootstrap.previous_loss)

    def _loss_ahead(self, law: PowerLaw) -> float | None:
        """Return what freezing the monitored module too would keep up of the loss."""
        own = self._noise.of(self._frozen)
        stationarity = min(
            1.0, 2 * (1 - law.exponent)
        )  # 1 where it only fluctuates around its place
        return (
            None
            if own is None
            else self._frozen_loss + own * stationarity * self._rates.remaining_fall
        )

    def _reason_to_thaw(self) -> str | None:
        if not self._frozen:
            return None
        if (excess := self._guard.excess) is not None:
            self._strictness *= STRICTER
            return f"the training loss came {excess:.1%} above its trend after a freeze"
        remaining = self._rates.remaining_rate_sum
        if remaining is not None and any(
            self._rates.exceeds(law, UNFORESEEN * limit) for law, limit in self._laws
        ):
            return (
                f"the learning rate to come adds up to {remaining:.2g}, far more than was foreseen"
            )
        return None

    def _thaw(self, reason: str) -> tuple[Decision, ...]:
        self._guard, self._laws, self._frozen_loss, self._frozen_noise = LossGuard(), (), 0.0, 0.0
        # Settling: a snapshot from before would not show what moves again.
        self._rates.settling, self._rates.rate_sums = SETTLING, {}
        self._restart_readings()
        return (*self._move_to(0, reason), *self._pass_over_untrainable())

    def _freeze(self, law: PowerLaw, limit: float, reason: str) -> tuple[Decision, ...]:
        loss, own = self._loss_ahead(law), self._noise.of(self._frozen)
        self._restart_readings()
        decisions = (*self._move_to(self._frozen + 1, reason), *self._pass_over_untrainable())
        if decisions:
            self._guard = self._guard.await_freeze(self._frozen)
            self._laws = (*self._laws, (law, limit))
            self._frozen_loss = self._frozen_loss if loss is None else loss
            self._frozen_noise += 0.0 if own is None else own
        return decisions

    def _restart_readings(self) -> None:
        self._movement, self._num_under, self._pause = Movement(), 0, EvaluationPause()

    def _pause_if_far(self, law: PowerLaw, limit: float) -> None:
        """Stop evaluating for as long as a snapshot is kept, once enough readings in a row were far
        from the limit.
        """
        change, patience = self._rates.rough_change_ahead(law), self._config.policy.patience
        is_far = change is None or change > FAR * limit
        self._pause = replace(self._pause, num_far=self._pause.num_far + 1 if is_far else 0)
        if self._pause.num_far >= patience:
            steps = min(
                self.window * self._rates.interval_steps,
                LONGEST_PAUSE * (self._total_steps or math.inf),
            )
            self._pause = EvaluationPause(until=self._rates.step + steps)
            self._movement = Movement()
            self._rates.rate_sums = {}  # the next reading used is one against a new snapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPause:
    """A break between evaluations after readings that were all far from a decision."""

    num_far: int = 0  # such readings in a row
    until: float = 0.0  # the step from which the module is evaluated again
