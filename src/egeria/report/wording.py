"""Numbers and findings as words, the same for the page and for the terminal."""

from __future__ import annotations

import math

from egeria.events import RunStarted
from egeria.report.history import History
from egeria.report.summary import Summary

UNKNOWN = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
_SPACE = "\N{NO-BREAK SPACE}"


def percent(share: float | None, *, signed: bool = False) -> str:
    """Write a share as a percentage; a dash where it is not known."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    return _minus(f"{100 * share:{'+' if signed else ''}.1f}{_SPACE}%")


def duration(seconds: float | None) -> str:
    """Write seconds in the unit that reads best."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    size = abs(seconds)
    sign = _MINUS if seconds < 0 else ""
    if size == 0:
        return f"0{_SPACE}s"
    for limit, factor, unit in (
        (1e-3, 1e6, "µs"),
        (1.0, 1e3, "ms"),
        (120.0, 1.0, "s"),
        (7200.0, 1 / 60, "min"),
    ):
        if size < limit:
            return f"{sign}{size * factor:.3g}{_SPACE}{unit}"
    return f"{sign}{size / 3600:,.1f}{_SPACE}h"


def number(value: float | None) -> str:
    """Write a number with four significant digits."""
    return UNKNOWN if value is None else _minus(f"{value:.4g}")


def count(value: int | None) -> str:
    """Write a whole number with its thousands apart."""
    return UNKNOWN if value is None else f"{value:,}"


def mebibytes(num_bytes: float) -> str:
    """Write an amount of memory."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def plural(amount: int, singular: str) -> str:
    """Write an amount of things."""
    return f"{amount:,} {singular}{'' if amount == 1 else 's'}"


def printable(text: str) -> str:
    """Replace what could steer a terminal; names and reasons come from anywhere."""
    return "".join(
        character if character.isprintable() else "�" for character in text.replace(_SPACE, " ")
    )


def progress(summary: Summary) -> str:
    """Return how far the run came."""
    total = summary.started.total_steps
    return f"{count(summary.steps_done)} {'' if total is None else f'of {count(total)} '}steps"


def frozen_when(summary: Summary) -> str:
    """Return when what is frozen at the end of the journal is, or was."""
    return "at the end" if summary.history.closed else "now"


ROUGH_STEPS = 100
"""Unfrozen steps under which their pace says little: batches differ in size, and the first ones are
slow."""
SHORT_SHARE = 0.75
"""Share of `total_steps` that a run must have had, or the report asks whether they were right."""
EARLY_SHARE = 0.1
"""Share of the run at its beginning in which iterations are the slow ones: memory and kernels are
still to be found."""


def verdict(summary: Summary) -> str:
    """Return in a sentence or two what freezing brought."""
    if summary.why_nothing_froze is not None:
        return summary.why_nothing_froze
    wall, what = summary.wall, "Freezing"
    if wall.saved_s is None:
        return (
            "The time saved is not known: no interval ran with nothing frozen, so there is no "
            "pace of this run "
            "to compare with."
        )
    if wall.saved_s < 0:
        return (
            f"{what} did not pay: with its overhead it cost about {duration(-wall.saved_s)} of "
            f"wall time ({percent(-wall.saved_s / wall.unfrozen_s if wall.unfrozen_s else None)}) "
            "more than it saved."
        )
    return (
        f"{what} saved about {duration(wall.saved_s)} of wall time ({percent(wall.saved_share)}) "
        "and "
        f"{duration(summary.cpu.saved_s)} of CPU time ({percent(summary.cpu.saved_share)}), "
        "overhead deducted."
    )


def cautions(summary: Summary) -> list[str]:
    """Return what a reader must know before trusting the numbers."""
    found = [*_doubts(summary.history), *_shortness(summary.history)]
    unfrozen = next((pace.num_steps for pace in summary.paces if not pace.frozen), 0)
    is_estimated = summary.wall.saved_s is not None and summary.why_nothing_froze is None
    if 0 < unfrozen < ROUGH_STEPS and is_estimated:
        pace = f"only {plural(unfrozen, 'step')} ran with nothing frozen"
        found.append(
            f"The time saved is a rough estimate: {pace}. A second run without egeria measures it."
        )
    run_steps = summary.started.total_steps or summary.steps_done
    if (
        is_estimated
        and summary.last_full_step is not None
        and summary.last_full_step <= EARLY_SHARE * run_steps
    ):
        found.append(
            "The time saved is probably a little less: all that ran with nothing frozen lies in "
            "the first "
            f"{EARLY_SHARE:.0%} of the run, and the first iterations are the slow ones."
        )
    if summary.num_dropped:
        reasons = "; ".join(f"{reason} ({amount})" for reason, amount in summary.dropped.items())
        found.append(
            f"{plural(summary.num_dropped, 'evaluation')} gave no usable reading: {reasons}."
        )
    for use in summary.cache:
        if again := use.stored_elsewhere(summary.started.environment.get("steps_per_epoch")):
            found.append(
                f"{plural(again[0], 'sample')} that another host had stored were computed again "
                "on the first, in "
                f"{duration(again[1])}: each host stores what comes to it. `egeria.ShardSampler` "
                "gives a process the "
                f"same samples in every epoch."
            )
    found += [f"Declined: {what} ({reason})." for what, reason in summary.declined]
    for where, error, amount in summary.faults:
        found.append(f"Fault in {where}, {plural(amount, 'time')}; training went on: {error}")
    return found


def _shortness(history: History) -> list[str]:
    """Return that a run was much shorter than was said at its beginning."""
    started = history.last(RunStarted)
    total_steps = (started.total_steps if started else None) or 0
    if not history.closed or history.last_step >= SHORT_SHARE * total_steps:
        return []
    return [
        f"The run ended after {count(history.last_step)} of the {count(total_steps)} steps of "
        "total_steps. Unless it "
        "was stopped early: total_steps takes steps of the optimizer, fewer than batches where "
        "gradients accumulate, "
        f"and run.step is called after each. What was to come seemed more than it was."
    ]


def _doubts(history: History) -> list[str]:
    """Return why the journal may not hold the whole run."""
    found = []
    if not history.closed:
        step = count(history.last_step)
        found.append(
            "The run was not closed (it still runs, or it crashed): the numbers stand as of step "
            f"{step}."
        )
    if history.first_step > 0:
        found.append(
            f"The journal begins at step {count(history.first_step)}, where the run was resumed; "
            "what came before "
            "stands in another directory and is not counted."
        )
    if history.num_processes > 1:
        found.append(
            f"The run was resumed {plural(history.num_processes - 1, 'time')}; "
            f"{plural(history.num_overridden, 'event')} after the points it went back to are left "
            "out."
        )
    if history.num_earlier_runs > 0:
        found.append(
            f"The directory also holds {plural(history.num_earlier_runs, 'earlier run')}, left "
            "out here."
        )
    if history.num_damaged > 0:
        found.append(f"{plural(history.num_damaged, 'line')} of the journal could not be read.")
    return found


def _minus(text: str) -> str:
    return text.replace("-", _MINUS)
