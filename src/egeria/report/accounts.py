"""What a run gave back beside time: memory, energy, money. What was not measured says why."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from egeria import events
from egeria.report.freezing import median_over_steps
from egeria.report.history import History, setting

PEAK, ENERGY, RELEASING = (
    "measuring the peak of memory",
    "measuring energy",
    "releasing the optimizer's state",
)
"""What is declined where it cannot be measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreedMemory:
    """Bytes that an iteration no longer keeps beside the weights, as counted, with the front frozen
    that is now.
    """

    activations: int
    gradients: int
    optimizer_state: int
    """Moved to main memory or dropped, with `freezing.release_optimizer_state`."""
    kept_before: int
    """All three, while everything was in training."""

    @property
    def num_bytes(self) -> int:
        """All that is no longer kept."""
        return self.activations + self.gradients + self.optimizer_state

    @property
    def share(self) -> float | None:
        """Of what was kept before."""
        return self.num_bytes / self.kept_before if self.kept_before else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
    """The most memory in use in an interval, the median over intervals, in bytes."""

    unfrozen: int
    now: int
    """With the front frozen that is now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergyUse:
    """Joules, as measured over whole intervals; our own work and the loop's evaluations are in
    them.
    """

    used: float
    saved: float | None
    """As time is, by the energy of an iteration: its time, without our work, by the power of its
    interval. What our work took is taken off. None where nothing ran unfrozen, or it is not known
    how long intervals were."""

    @property
    def saved_share(self) -> float | None:
        """Of what the same steps would have used."""
        whole = None if self.saved is None else self.used + self.saved
        return self.saved / whole if self.saved is not None and whole else None


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideTime:
    """What a run gave back beside time."""

    freed: FreedMemory | None
    """None where it could not be counted."""
    peak: PeakMemory | None
    energy: EnergyUse | None
    money: float | None
    """Saved, by the price of an hour and the wall time saved; None without a price, or where the
    time is not known."""
    currency: str
    is_peak_asked: bool
    is_energy_asked: bool


def accounts_of(
    history: History,
    intervals: Sequence[events.IntervalMeasured],
    is_full: Callable[[events.IntervalMeasured], bool],
    frozen: int,
    saved_s: float | None,
) -> BesideTime:
    """Return what a run gave back.

    Args:
        history: its course.
        intervals: those whose pace is known.
        is_full: whether everything was updated at every step of an interval.
        frozen: how many front layer modules are frozen at the end.
        saved_s: wall-clock seconds that were saved; None where unknown.
    """
    started = history.last(events.RunStarted)

    def asked(name: str) -> object:
        return None if started is None else setting(started, "accounts", name)

    price = asked("price_per_hour")
    return BesideTime(
        freed=_freed(history, frozen),
        peak=_peak([entry for entry in intervals if entry.peak_bytes], is_full, frozen),
        energy=_energy(intervals, is_full, history.overhead_wall_s),
        money=saved_s / 3600 * price
        if isinstance(price, (int, float)) and saved_s is not None
        else None,
        currency=str(asked("currency") or ""),
        is_peak_asked=bool(asked("peak_memory")),
        is_energy_asked=bool(asked("energy")),
    )


def _freed(history: History, frozen: int) -> FreedMemory | None:
    profile = history.last(events.MemoryProfiled)
    if profile is None:
        return None
    declined = [event.what for event in history.of(events.Declined)]
    started = history.last(events.RunStarted)
    keeps = started is None or setting(started, "freezing", "release_optimizer_state") in (
        None,
        "keep",
    )
    runs_through = any(what.startswith("the full saving behind") for what in declined)
    kept = (profile.activations, profile.gradients, profile.optimizer_state)
    return FreedMemory(
        activations=0 if runs_through else sum(profile.activations[:frozen]),
        gradients=sum(profile.gradients[:frozen]),
        optimizer_state=0
        if keeps or RELEASING in declined
        else sum(profile.optimizer_state[:frozen]),
        kept_before=sum(map(sum, kept)),
    )


def _peak(
    intervals: Sequence[events.IntervalMeasured],
    is_full: Callable[[events.IntervalMeasured], bool],
    frozen: int,
) -> PeakMemory | None:
    unfrozen = [entry.peak_bytes or 0 for entry in intervals if is_full(entry)]
    now = [entry.peak_bytes or 0 for entry in intervals if entry.frozen == frozen]
    if not unfrozen or not now:
        return None
    return PeakMemory(
        unfrozen=round(statistics.median(unfrozen)), now=round(statistics.median(now))
    )


def _energy(
    intervals: Sequence[events.IntervalMeasured],
    is_full: Callable[[events.IntervalMeasured], bool],
    overhead_s: float,
) -> EnergyUse | None:
    measured = [entry for entry in intervals if entry.energy_j]
    if not measured:
        return None
    watts = [(_power(entry), entry) for entry in measured if entry.energy_window_s]
    paces = [(power * entry.iteration_wall_s, entry) for power, entry in watts]
    full = [(pace, entry.num_steps) for pace, entry in paces if is_full(entry)]
    saved = None
    if full:
        unfrozen = median_over_steps(full)
        # The overhead is that of the whole run, of which there may be energy for a part only.
        share = sum(entry.num_steps for _, entry in watts) / sum(
            entry.num_steps for entry in intervals
        )
        overhead = share * overhead_s * statistics.median(power for power, _ in watts)
        saved = (
            sum((unfrozen - pace) * entry.num_steps for pace, entry in paces if not is_full(entry))
            - overhead
        )
    return EnergyUse(used=sum(entry.energy_j or 0.0 for entry in measured), saved=saved)


def _power(entry: events.IntervalMeasured) -> float:
    return (entry.energy_j or 0.0) / (entry.energy_window_s or math.inf)
