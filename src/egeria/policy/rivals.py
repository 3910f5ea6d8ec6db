"""Rivals of the default policy: what others freeze by, and controls."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

from egeria.config.checks import Front, read_timetable
from egeria.errors import ConfigError
from egeria.policy.base import FrontPolicy, relative_change
from egeria.policy.paper import EgeriaPolicy
from egeria.policy.protocol import GRADIENTS, WEIGHTS, Decision, Interval

# shares are sums in floating point: the smallest error must not put a move off by an interval
ROUNDING = 1e-9
POWERS = {"linear": 1, "squared": 2, "cubic": 3}  # the exponent of each `policy.shape`
Timetable = tuple[tuple[float, Front], ...]
"""Shares of the training in the order of time, and which front layer modules are frozen, or rarely
updated, then."""


class TimedPolicy(FrontPolicy, ABC):
    """Follows a timetable; a move is made at the end of the first interval that
    reaches its time.
    """

    default_start = (
        0.0  # share of the training before which nothing freezes, where `policy.start` is None
    )

    def _prepare(self) -> None:
        if self._total_steps is None:
            raise ConfigError(
                f"The policy {self._config.policy.name!r} freezes at shares of the training, so "
                "it must know its "
                f"length, found total_steps=None. Pass total_steps=len(loader) * epochs to attach."
            )
        self._length, self._num_freezable = self._total_steps, len(self._trainable) - 1
        self._start = (
            self.default_start if self._config.policy.start is None else self._config.policy.start
        )
        self.timetable = self._timetable()

    @abstractmethod
    def _timetable(self) -> Timetable:
        """Return the timetable, by the settings."""

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Return the decisions of the newest move whose time has come."""
        done = interval.step / self._length
        front = next(
            (front for share, front in reversed(self.timetable) if share <= done + ROUNDING),
            Front(),
        )
        reason = f"{done:.1%} of the training is done, and by then {self._describe(front)}"
        return (*self._move_to(front.frozen, reason), *self._update_every(front.periods, reason))

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return the steps to the next move; None where there is none left."""
        moves = (
            share
            for share, front in self.timetable
            if min(front.frozen, self._deepest_freeze) != self._frozen
        )
        ahead = (share * self._length - step for share in moves)
        return next((steps for steps in ahead if steps > 0), None)

    def _describe(self, front: Front) -> str:
        depth = front.frozen
        what = f"{depth} layer module{' is' if depth == 1 else 's are'}" if depth else "nothing is"
        return f"{what} to be frozen{describe_periods(front.periods, depth)}"


class StaticSchedule(TimedPolicy):
    """'static': follows `policy.schedule`, such as "0.54:2 0.79:3 0.9:0", as far as the layer
    modules may freeze.

    An entry with fewer modules than the one before thaws the others. "0.1:1,3/4,4/2" freezes the
    first module, and has the next up to the third updated at every 4th optimizer step, and the
    fourth at every 2nd.
    """

    def _timetable(self) -> Timetable:
        text = self._config.policy.schedule
        if text is None:
            raise ConfigError(
                "The policy 'static' follows policy.schedule, text such as \"0.54:2 0.9:0\", "
                "found None. "
                "Set it where the configuration is built or in its TOML file."
            )
        return read_timetable(text)


class LinearSchedule(TimedPolicy):
    """'linear': freezes evenly from `start` on, until a `level` of the layer modules is frozen at
    the end.

    `depth(t) = floor(level * (t - start) / (1 - start) * (L - 1))` for `L` layer modules, so module
    `i`, counted from 0, freezes at `t = start + (1 - start) * (i + 1) / (level * (L - 1))`.

    Source: MosaicML Composer, `LayerFreezing`, which counts leaf layers in the order of definition,
    by epochs.
    """

    default_start = 0.5

    def _timetable(self) -> Timetable:
        reached = self._config.policy.level * self._num_freezable
        depths = range(1, self._num_freezable + 1)
        return tuple(
            (self._start + (1 - self._start) * depth / reached, Front(depth)) for depth in depths
        )


class FreezeOut(TimedPolicy):
    """'freezeout': anneals the learning rate of each layer module to zero at its own time, and
    freezes it then.

    Module `i` of `0..L`, where `L` is the last, ends at the share `r_i = (t_0 + (1 - t_0) * i / L)
    ** p` of the training. Until then its rate is `lr_i(t) = lr_i(0) / 2 * (1 + cos(pi * t / r_i))`
    with `lr_i(0) = lr`, or `lr / r_i` where scaled. `lr` is the initial rate of the optimizer: this
    is the schedule of the whole run, and takes the place of the user's, for the last module (`r_L =
    1`) too.

    Source: Brock et al., "FreezeOut" (arXiv 1706.04983), with the 1/2 that the printed formula
    lacks.
    """

    default_start = 0.8

    def _timetable(self) -> Timetable:
        last, power = max(1, self._num_freezable), POWERS[self._config.policy.shape]
        modules = range(len(self._trainable))
        self._ends = [
            (self._start + (1 - self._start) * index / last) ** power for index in modules
        ]
        return tuple((end, Front(depth)) for depth, end in enumerate(self._ends[:-1], start=1))

    def rate_shares(self, step: int) -> tuple[float, ...] | None:
        """Return the rate of each layer module for the step after `step`, as a share of the initial
        one.
        """
        if not self._config.freezing.enabled:
            return None
        return tuple(self._rate_share(step / self._length, end) for end in self._ends)

    def _rate_share(self, done: float, end: float) -> float:
        if done >= end:
            return 0.0
        first = 1 / end if self._config.policy.scaled else 1.0
        return first / 2 * (1 + math.cos(math.pi * done / end))

    def _describe(self, front: Front) -> str:
        return f"{super()._describe(front)}: their learning rate has come down to 0"


class RandomTimes(TimedPolicy):
    """'random': freezes at times drawn from [start, 1], by `policy.seed` alone: our control, to be
    beaten by all.
    """

    default_start = 0.1

    def _timetable(self) -> Timetable:
        generator = random.Random(self._config.policy.seed)
        times = (
            self._start + (1 - self._start) * generator.random() for _ in range(self._num_freezable)
        )
        return tuple((share, Front(depth)) for depth, share in enumerate(sorted(times), start=1))


class AutoFreeze(FrontPolicy):
    """'autofreeze': freezes the front modules whose gradients change less than those of the others.

    At evaluation `k`, the end of an interval, `G_l(k)` is the L1 norm of the gradients of module
    `l` summed over the interval, and `eta_l = |G_l(k-1) - G_l(k)| / G_l(k-1)`. With the percentile
    of `eta` over the modules that are still active as the threshold, the first of them with `eta >=
    threshold` becomes the first one in training. Nothing thaws.

    Source: Liu et al., "AutoFreeze" (arXiv 2102.01386), and its code.
    """

    needs = frozenset({GRADIENTS})
    _saved = (*FrontPolicy._saved, "previous")

    def _prepare(self) -> None:
        self._previous: tuple[float | None, ...] | None = None

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Compare the gradients of this interval with those of the one before."""
        before, self._previous = self._previous, interval.gradients
        if before is None or interval.gradients is None:
            return ()
        active = [
            module
            for module in range(self._frozen, len(self._trainable))
            if self._trainable[module]
        ]
        changes = [relative_change(before[module], interval.gradients[module]) for module in active]
        if not changes or any(math.isnan(change) for change in changes):
            return ()  # nothing may freeze past a gradient that is not finite
        threshold = percentile(changes, self._config.policy.percentile)
        first, change = next(
            pair for pair in zip(active, changes, strict=True) if pair[1] >= threshold
        )
        if first <= self._frozen:
            return ()
        where = f"{self._config.policy.percentile:g}th percentile {threshold:.3g}"
        return self._move_to(
            first, f"its gradients change less than the {where}; those of the next by {change:.3g}"
        )

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return the steps to the next evaluation; None where nothing is left to freeze."""
        return float(interval_steps) if self._frozen < self._deepest_freeze else None


class WeightChange(EgeriaPolicy):
    """'weight_change': the paper's rule on `||w_now - w_then|| / ||w_then||` of the weights,
    without a reference.

    Source: our own control, for what activations show beyond weights.
    """

    needs = frozenset({WEIGHTS})
    _judged = "the change of its weights was"

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Judge the front module by the change of its weights in the interval."""
        decisions = super().observe_interval(interval)
        module = self._candidate
        if decisions or module is None or interval.loss is None or interval.weight_changes is None:
            # over an interval that ended with a thaw the front did not move: that is no reading
            return decisions
        change = interval.weight_changes[module]
        if change is None or not math.isfinite(change):
            return ()
        return self._judge(module, change).decisions

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return the least number of steps until the next freeze; None where nothing is left to
        freeze.
        """
        return None if self._candidate is None else float((2 * self.window - 1) * interval_steps)


def describe_periods(periods: Sequence[int], frozen: int) -> str:
    """Return how often front modules behind the frozen ones are updated, as the end of a sentence;
    empty for always.
    """
    active = [period for period in periods[frozen:] if period > 1]
    parts = [
        f"{active.count(period)} at every {ordinal(period)}" for period in dict.fromkeys(active)
    ]
    return f", and of those behind {', '.join(parts)} step to be updated" if parts else ""


def ordinal(number: int) -> str:
    """Return a number as in "every 4th"."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(
        number % 10 if number % 100 not in (11, 12, 13) else 0, "th"
    )
    return f"{number}{ending}"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile of values, interpolated linearly between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    lower = math.floor(place)
    if place == lower or ordered[lower] == ordered[lower + 1]:
        return ordered[lower]
    between = ordered[lower] + (place - lower) * (ordered[lower + 1] - ordered[lower])
    return min(between, ordered[lower + 1])
