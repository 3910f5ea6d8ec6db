"""What the report says of the reference model: its number formats, and whether they were exact enough."""

from __future__ import annotations

from dataclasses import dataclass

from egeria.events import FidelityChecked, RungTaken
from egeria.report.history import History
from egeria.report.markup import paragraph, section, table
from egeria.report.words import count, percent


@dataclass(frozen=True, kw_only=True, slots=True)
class RungUse:
    """One number format that the reference had, and what its checks found."""

    rung: str
    step: int
    """When it was taken."""
    reason: str
    num_checks: int
    largest_share: float | None
    """Its error as a share of the plasticity it was to show, the largest of all checks; None without any."""


def list_rungs(history: History) -> tuple[RungUse, ...]:
    """Return the number formats of a run, in the order they were taken."""
    taken = history.of(RungTaken)
    ends = [*(event.step for event in taken[1:]), None][: len(taken)]
    return tuple(
        _use(event, [check for check in history.of(FidelityChecked) if _is_of(check, event, end)])
        for event, end in zip(taken, ends, strict=True)
    )


def reference_section(history: History) -> str:
    """Return the table of the number formats."""
    rungs = list_rungs(history)
    if not rungs:
        return ""
    columns = (
        ("format", ""),
        ("from step", "number"),
        ("checks", "number"),
        ("largest error", "number"),
        ("why", "reason"),
    )
    lines = [
        (entry.rung, count(entry.step), count(entry.num_checks), percent(entry.largest_share), entry.reason)
        for entry in rungs
    ]
    meaning = paragraph(
        "The reference is a snapshot in a cheaper number format. Its error is the metric between the "
        "snapshot and its quantized form, here as a share of the plasticity it was there to show.",
        "soft",
    )
    return section("reference", "Reference model", table("Reference model", columns, lines), meaning)


def _is_of(check: FidelityChecked, taken: RungTaken, end: int | None) -> bool:
    # The check that ends a rung is written at the same step as the rung after it.
    return check.rung == taken.after and check.step >= taken.step and (end is None or check.step <= end)


def _use(taken: RungTaken, checks: list[FidelityChecked]) -> RungUse:
    shares = [check.error / check.plasticity for check in checks if check.plasticity > 0]
    return RungUse(
        rung=taken.after,
        step=taken.step,
        reason=taken.reason,
        num_checks=len(checks),
        largest_share=max(shares, default=None),
    )
