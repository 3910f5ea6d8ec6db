"""'egeria': the policy of the paper (algorithm 1), freezing the front module once its plasticity is
stationary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from egeria.policy.base import BootstrappedPolicy
from egeria.policy.protocol import (
    BOOTSTRAPPING,
    PLASTICITY,
    Decision,
    Interval,
    Judgement,
    Reading,
    Thaw,
)
from egeria.policy.schedules import Moment, UnfreezeAction


class EgeriaPolicy(BootstrappedPolicy):
    """Freezes from the front by stationary plasticity, thaws by the learning rate (algorithm 1 and
    §4.2.2).

    A layer module without parameters to train is passed over at once: there is nothing in it to
    wait for.
    """

    needs = frozenset({PLASTICITY})
    _own = ("window", "histories", "learning_rate", "freeze_learning_rate", "on_hold")
    _saved = (*BootstrappedPolicy._saved, *_own)

    def _prepare(self) -> None:
        super()._prepare()
        share, readings = (
            self._config.freezing.tolerance_share,
            self._config.freezing.tolerance_readings,
        )
        history = ModuleHistory(tolerance_share=share, tolerance_readings=readings)
        self._histories = (history,) * len(self._trainable)
        self._learning_rate: float | None = None
        self._freeze_learning_rate: float | None = None
        self._on_hold = False

    @property
    def _candidate(self) -> int | None:
        is_waiting = self.stage == BOOTSTRAPPING or self._on_hold
        return None if is_waiting or self._frozen >= self._deepest_freeze else self._frozen

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Update the stage by the loss, and thaw where the learning rate asks for it."""
        now = Moment(
            step=interval.step,
            total_steps=self._total_steps,
            frozen=self._frozen,
            learning_rate=interval.learning_rate,
            previous_learning_rate=self._learning_rate,
            freeze_learning_rate=self._freeze_learning_rate,
        )
        action = self._rule.judge(now)
        self._learning_rate = interval.learning_rate
        self._on_hold = action is UnfreezeAction.HOLD
        if self.stage == BOOTSTRAPPING:
            return self._observe_bootstrapping(interval.loss)
        if action in (UnfreezeAction.THAW, UnfreezeAction.RESTART) and self._frozen:
            return self._thaw(interval, restart=action is UnfreezeAction.RESTART)
        return self._pass_over_untrainable()

    def observe_reading(self, reading: Reading) -> Judgement:
        """Update the history of the monitored module; readings of another module change nothing."""
        if reading.module != self.monitored:
            return super().observe_reading(reading)
        return self._judge(reading.module, reading.value)

    def _judge(self, module: int, value: float) -> Judgement:
        history = self._histories[module].observe(value, self._window)
        self._histories = (*self._histories[:module], history, *self._histories[module + 1 :])
        decisions: tuple[Decision, ...] = ()
        if history.stationary >= self._window and self._config.freezing.enabled:
            if self._freeze_learning_rate is None and self._trainable[module]:
                self._freeze_learning_rate = self._learning_rate
            reason = f"plasticity stationary for {history.stationary} evaluations"
            decisions = (*self._move_to(module + 1, reason), *self._pass_over_untrainable())
        return Judgement(
            smoothed=history.smoothed[-1],
            slope=history.slope,
            tolerance=history.tolerance,
            stationary=history.stationary,
            decisions=decisions,
        )

    def _pass_over_untrainable(self) -> tuple[Decision, ...]:
        return () if self._candidate is None else super()._pass_over_untrainable()

    def _thaw(self, interval: Interval, *, restart: bool) -> tuple[Thaw]:
        before, full = self._freeze_learning_rate, self._config.plasticity.window
        self._window = (
            full if restart else max(self._config.unfreezing.minimum_window, self._window // 2)
        )
        self._frozen, self._freeze_learning_rate = 0, None
        # The early slopes stay: they stand for the fast early phase of the module.
        self._histories = tuple(
            replace(history, readings=(), smoothed=(), slope=None, stationary=0)
            for history in self._histories
        )
        moved = "risen" if restart else "fallen"
        # A rule of the user's own may thaw where nothing but modules without anything to train were
        # frozen.
        rates = "" if before is None else f" from {before:g} to {interval.learning_rate:g}"
        reason = f"the learning rate has {moved}{rates} since the first freeze"
        return (Thaw(reason=reason, window=self._window),)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleHistory:
    """The plasticity of one layer module since monitoring of it began: smoothing, slope, tolerance
    and patience.

    Source: eq. 2 (the printed sum has one term too many: exactly `window` readings are averaged),
    algorithm 1 (the printed test is signed; the prose means the absolute slope), §4.2.2.
    """

    tolerance_share: float
    tolerance_readings: int
    readings: tuple[float, ...] = ()
    smoothed: tuple[float, ...] = ()
    early_slopes: tuple[float, ...] = ()
    slope: float | None = None
    stationary: int = 0

    @property
    def tolerance(self) -> float | None:
        """`T`: the share of the largest early slope; None until all early slopes are known."""
        if len(self.early_slopes) < self.tolerance_readings:
            return None
        return self.tolerance_share * max(map(abs, self.early_slopes))

    def observe(self, value: float, window: int) -> ModuleHistory:
        """Return the history with one more reading; its slope is fitted once `window` smoothed
        values are there.
        """
        readings = (*self.readings, value)[-window:]
        smoothed = (*self.smoothed, sum(readings) / len(readings))[-window:]
        if len(smoothed) < window:
            return replace(self, readings=readings, smoothed=smoothed, slope=None, stationary=0)
        slope = least_squares_slope(smoothed)
        early = (*self.early_slopes, slope)[: self.tolerance_readings]
        updated = replace(
            self, readings=readings, smoothed=smoothed, early_slopes=early, slope=slope
        )
        tolerance = updated.tolerance
        # No movement at all is stationary whatever the tolerance, which may itself be zero.
        is_stationary = tolerance is not None and (slope == 0 or abs(slope) < tolerance)
        return replace(updated, stationary=self.stationary + 1 if is_stationary else 0)


def least_squares_slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through equally spaced values, per evaluation."""
    count = len(values)
    centre = (count - 1) / 2
    mean = sum(values) / count
    covariance = sum((index - centre) * (value - mean) for index, value in enumerate(values))
    return covariance / (count * (count * count - 1) / 12)
