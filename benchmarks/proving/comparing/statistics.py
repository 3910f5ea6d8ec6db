"""Means over seeds, differences of pairs of runs, and rank correlations, each with a 95 % interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Two-sided 95 % quantiles of Student's t by degrees of freedom, 1 to 30: NIST/SEMATECH e-Handbook of
# Statistical Methods, 1.3.6.7.2, column 0.975. A test integrates the density and finds the same.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

NUM_RESAMPLES = 2000
"""Of a bootstrap; drawn by a generator of its own that begins alike, so that the same points give the same interval."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A mean over seeds."""

    mean: float
    sd: float | None
    """Sample standard deviation; None for one seed."""
    count: int
    low: float | None
    high: float | None
    """Ends of the 95 % interval of the mean; None for one seed."""

    def shows(self, digits: int = 2, *, signed: bool = False, interval: bool = False) -> str:
        """Write it as mean ± sd, or as mean with its interval."""
        sign = "+" if signed else ""
        text = f"{self.mean:{sign}.{digits}f}"
        if self.sd is None or self.low is None or self.high is None:
            return text
        if interval:
            return f"{text} [{self.low:{sign}.{digits}f}, {self.high:{sign}.{digits}f}]"
        return f"{text} ± {self.sd:.{digits}f}"


def spread(values: Sequence[float]) -> Spread | None:
    """Return the mean of some values, of paired differences for example; None where there are none."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Spread(mean=mean, sd=None, count=1, low=None, high=None)
    sd = statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
    half = t_quantile(len(values) - 1) * sd / math.sqrt(len(values))
    return Spread(mean=mean, sd=sd, count=len(values), low=mean - half, high=mean + half)


def t_quantile(degrees: int) -> float:
    """Return the factor of a two-sided 95 % interval; over 30 degrees of freedom that of 30, which is wider."""
    return T_QUANTILES[min(degrees, len(T_QUANTILES)) - 1]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A rank correlation, or the difference of two."""

    value: float | None
    """None where it has none: a column that is the same everywhere has no ranks."""
    low: float | None
    high: float | None
    """Ends of the 95 % interval, by percentiles of a bootstrap."""

    def shows(self) -> str:
        """Write it with its interval."""
        if self.value is None or self.low is None or self.high is None:
            return "not known"
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def rank_correlations(
    columns: Mapping[str, Sequence[float]], target: Sequence[float], groups: Sequence[Hashable], *, within: bool
) -> dict[str, tuple[Estimate, Estimate]]:
    """Return how the order of each column agrees with that of the target, by Spearman's coefficient.

    Intervals are of a bootstrap in two stages, groups and then the points of each, drawn alike for all columns.

    Args:
        columns: numbers for each point, by name; all finite.
        target: for each point, finite.
        groups: to which group each point belongs.
        within: whether points are ranked among those of their group, and the ranks are pooled then.

    Returns:
        By name the correlation, and by how much that of the first column is above it.
    """
    values_CN = np.array([*columns.values(), target], dtype=np.float64)
    members = [np.array([place for place, own in enumerate(groups) if own == group]) for group in dict.fromkeys(groups)]
    found_C = _correlate(values_CN, members if within else [np.concatenate(members)])
    drawing = np.random.default_rng(0)
    drawn_RC = []
    for _ in range(NUM_RESAMPLES):
        chosen = [members[place] for place in drawing.integers(len(members), size=len(members))]
        parts = [part[drawing.integers(len(part), size=len(part))] for part in chosen]
        drawn_RC.append(_correlate(values_CN, parts if within else [np.concatenate(parts)]))
    resampled_RC = np.array(drawn_RC)
    return {
        name: (
            _estimate(found_C[place], resampled_RC[:, place]),
            _estimate(found_C[0] - found_C[place], resampled_RC[:, 0] - resampled_RC[:, place]),
        )
        for place, name in enumerate(columns)
    }


def _correlate(values_CN: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the correlation [C - 1] of the ranks of each row with those of the last, ranked part by part.

    The sum of the signs of a value's differences to all others is twice its rank, ties shared, less the mean rank.
    """
    signs = [np.sign(values_CN[:, part, None] - values_CN[:, None, part]).mean(2) for part in parts]
    ranks_CN = np.concatenate(signs, axis=1)
    sizes_C = np.sqrt((ranks_CN**2).sum(1))
    with np.errstate(invalid="ignore"):
        return (ranks_CN[:-1] @ ranks_CN[-1]) / (sizes_C[:-1] * sizes_C[-1])  # type: ignore[no-any-return]


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    known = resampled[np.isfinite(resampled)]
    if not math.isfinite(value) or not len(known):
        return Estimate(value=None, low=None, high=None)
    low, high = np.percentile(known, [2.5, 97.5])
    return Estimate(value=round(float(value), 12), low=round(float(low), 12), high=round(float(high), 12))
