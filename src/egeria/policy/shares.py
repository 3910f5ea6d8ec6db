"""Shares of worth: what the intervals in which it was measured tell of what each layer module
brings.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

LEAST_INTERVALS = 3  # with a measure, to judge its error by
LATER_ERRORS = 3.0
"""Standard errors by which what the steps of all but the last module brought must stand above
nothing at the looks after the first, of which one may pass by chance; at the first it must be above
nothing."""
SHARE_ERRORS = 2.0
"""Standard errors that are added to the share of a layer module, so that what is not known well
does not freeze early. They are those of a ratio: what a batch makes of all modules alike is none.
By as much do shares scatter between runs (record 0039)."""

NEXT_TO_NOTHING = 0.25
"""Share of what the first look saw brought, under which its later half may tell too little of the
layer modules."""


def known_sum(parts: Sequence[float | None]) -> float:
    """Return the sum of what is known."""
    return math.fsum(part for part in parts if part is not None)


def complete(worths: Sequence[Sequence[float | None]]) -> list[Sequence[float | None]]:
    """Return the intervals that lack no layer module which others know, as one with an infinite
    gradient does.
    """
    known = [any(part is not None for part in column) for column in zip(*worths, strict=True)]
    return [row for row in worths if known == [part is not None for part in row]]


def helped(
    rows: Sequence[Sequence[float | None]], num_measured: int, num_errors: float = 0.0
) -> bool:
    """Return whether the steps of what may freeze brought something, and those of all together did
    not harm.

    Args:
        rows: by interval, what each layer module brought.
        num_measured: of the first layer modules, by which worth is measured.
        num_errors: standard errors that it must be above nothing.
    """
    fronts = [known_sum(row[:num_measured]) for row in rows]
    is_much = len(fronts) >= LEAST_INTERVALS and math.fsum(fronts) > num_errors * _error(fronts)
    return is_much and math.fsum(map(known_sum, rows)) > 0


def telling(
    worths: Sequence[Sequence[float | None]], num_unsettled: int, num_measured: int
) -> list[Sequence[float | None]]:
    """Return the intervals that shares are taken of: those behind the first `num_unsettled`, or
    all.

    In the first ones a fresh head may learn nearly all there is. But where the training is long, so
    that the others bring next to nothing any more, only the first tell what brought it: these
    others do not stand out from nothing then, all together do, and nearly all of that is of the
    first.

    Args:
        worths: by interval, what each layer module brought.
        num_unsettled: intervals in which a fresh head may learn.
        num_measured: of the first layer modules, by which worth is measured.
    """
    rows, settled = complete(worths), complete(worths[num_unsettled:])
    late, whole = (
        math.fsum(known_sum(row[:num_measured]) for row in part) for part in (settled, rows)
    )
    is_over = late < NEXT_TO_NOTHING * whole and helped(rows, num_measured, LATER_ERRORS)
    is_told = helped(settled, num_measured, SHARE_ERRORS if is_over else 0.0)
    return settled if is_told else rows


def harmed(rows: Sequence[Sequence[float | None]]) -> bool:
    """Return whether the steps of all layer modules together went up the loss."""
    wholes = [known_sum(row) for row in rows]
    return len(wholes) >= LEAST_INTERVALS and math.fsum(wholes) < -LATER_ERRORS * _error(wholes)


def _error(parts: Sequence[float]) -> float:
    """Return the standard error of the sum of what intervals brought.

    By the differences from one to the next, so that what merely grows or fades over the intervals
    is no error.
    """
    steps = [(after - before) ** 2 for before, after in itertools.pairwise(parts)]
    return math.sqrt(statistics.fmean(steps) / 2 * len(parts))


def upper_share(parts: Sequence[float], wholes: Sequence[float], total: float) -> float:
    """Return which share of `total` is in `parts`, as much as it may be: more if modules harm and
    `wholes` are less.
    """
    share = math.fsum(parts) / total
    apart = [part - share * whole for part, whole in zip(parts, wholes, strict=True)]
    return max(0.0, share + SHARE_ERRORS * _error(apart) / total)
