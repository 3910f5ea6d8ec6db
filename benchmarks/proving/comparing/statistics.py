"""Means over seeds and differences of pairs of runs, with a 95 % interval."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t by degrees of freedom, 1 to 30: NIST/SEMATECH e-Handbook of
# Statistical Methods, 1.3.6.7.2, column 0.975. A test integrates the density and finds the same.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


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
