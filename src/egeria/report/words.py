"""Numbers and findings as words, the same for the page and for the terminal."""

from __future__ import annotations

import math

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
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
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
    return "".join(character if character.isprintable() else "�" for character in text.replace(_SPACE, " "))


def progress(summary: Summary) -> str:
    """Say how far the run came."""
    if summary.total_steps is None:
        return f"{count(summary.steps_done)} steps"
    return f"{count(summary.steps_done)} of {count(summary.total_steps)} steps"


def frozen_now(summary: Summary) -> str:
    """Say how much is frozen at the end of the journal."""
    if not summary.modules:
        return str(summary.frozen_now)
    return f"{summary.frozen_now} of {len(summary.modules)} modules"


def verdict(summary: Summary) -> str:
    """Say in a sentence or two what freezing brought."""
    if summary.why_nothing_froze is not None:
        return summary.why_nothing_froze
    wall = summary.wall
    if wall.saved_s is None:
        return (
            "The time saved is not known: no interval ran with nothing frozen, so there is no pace of this run "
            "to compare with."
        )
    if wall.saved_s < 0:
        return (
            f"Freezing did not pay: with its overhead it cost about {duration(-wall.saved_s)} of wall time "
            f"({percent(-wall.saved_s / wall.unfrozen_s if wall.unfrozen_s else None)}) more than it saved."
        )
    return (
        f"Freezing saved about {duration(wall.saved_s)} of wall time ({percent(wall.saved_share)}) and "
        f"{duration(summary.cpu.saved_s)} of CPU time ({percent(summary.cpu.saved_share)}), overhead deducted."
    )


def cautions(summary: Summary) -> list[str]:
    """List what a reader must know before trusting the numbers."""
    found = _doubts(summary)
    if summary.num_dropped:
        reasons = "; ".join(f"{reason} ({amount})" for reason, amount in summary.dropped.items())
        found.append(f"{plural(summary.num_dropped, 'evaluation')} gave no usable reading: {reasons}.")
    for what, reason in summary.declined:
        found.append(f"Declined: {what} ({reason}).")
    for where, error, amount in summary.faults:
        found.append(f"Fault in {where}, {plural(amount, 'time')}; training went on: {error}")
    return found


def _doubts(summary: Summary) -> list[str]:
    """List why the journal may not tell the whole run."""
    times = plural(summary.num_processes - 1, "time")
    overridden = plural(summary.num_overridden, "event")
    doubts = (
        (
            not summary.closed,
            "The run was not closed (it still runs, or it crashed): the numbers stand as of step "
            f"{count(summary.steps_done)}.",
        ),
        (
            not summary.overhead_complete,
            "The overhead counts readings and reference refreshes alone, because a process did not close its run: "
            "the true overhead is a little higher.",
        ),
        (
            summary.first_step > 0,
            f"The journal begins at step {count(summary.first_step)}, where the run was resumed; what came before "
            "stands in another directory and is not counted.",
        ),
        (
            summary.num_processes > 1,
            f"The run was resumed {times}; {overridden} after the points it went back to are left out.",
        ),
        (
            summary.num_earlier_runs > 0,
            f"The directory also holds {plural(summary.num_earlier_runs, 'earlier run')}, left out here.",
        ),
        (summary.num_damaged > 0, f"{plural(summary.num_damaged, 'line')} of the journal could not be read."),
    )
    return [sentence for holds, sentence in doubts if holds]


def _minus(text: str) -> str:
    return text.replace("-", _MINUS)
