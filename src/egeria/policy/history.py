"""Judging one layer module: smoothing, slope, tolerance and patience (paper eq. 2, algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


def least_squares_slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through equally spaced values, per evaluation."""
    count = len(values)
    centre = (count - 1) / 2
    mean = sum(values) / count
    covariance = sum((index - centre) * (value - mean) for index, value in enumerate(values))
    return covariance / (count * (count * count - 1) / 12)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleHistory:
    """The plasticity of one layer module since monitoring of it began.

    Left by a freeze after `window` consecutive stationary evaluations, or by a thaw, which calls
    `restarted`. The early slopes, and so the tolerance, belong to the module for the whole run:
    they stand for its fast early phase, against which later movement is measured.

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
        """Return the history with one reading more.

        The slope is fitted once `window` smoothed values are there. No movement at all is
        stationary whatever the tolerance, which may itself be zero.
        """
        readings = (*self.readings, value)[-window:]
        smoothed = (*self.smoothed, sum(readings) / len(readings))[-window:]
        if len(smoothed) < window:
            return replace(self, readings=readings, smoothed=smoothed, slope=None, stationary=0)
        slope = least_squares_slope(smoothed)
        early = self.early_slopes
        if len(early) < self.tolerance_readings:
            early = (*early, slope)
        seen = replace(self, readings=readings, smoothed=smoothed, early_slopes=early, slope=slope)
        return replace(seen, stationary=self.stationary + 1 if seen._is_stationary() else 0)

    def restarted(self) -> ModuleHistory:
        """Return an empty history that keeps the early slopes."""
        return ModuleHistory(
            tolerance_share=self.tolerance_share,
            tolerance_readings=self.tolerance_readings,
            early_slopes=self.early_slopes,
        )

    def _is_stationary(self) -> bool:
        if self.slope is None or self.tolerance is None:
            return False
        return self.slope == 0 or abs(self.slope) < self.tolerance

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ModuleHistory:
        """Rebuild a history from `state_dict`."""
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in state.items()
        }
        return cls(**fields)
