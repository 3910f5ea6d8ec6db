"""What the report says of the activation cache: why it was on or off, and what it did."""

from __future__ import annotations

from dataclasses import dataclass

from egeria.events import CacheDecided, CacheUsed
from egeria.report.history import History
from egeria.report.markup import paragraph, section, table
from egeria.report.words import UNKNOWN, count, duration, mebibytes, percent

MEANING = (
    "The output of the frozen front is stored by sample and read back ahead of its use, so that the forward pass of "
    "the front is skipped. 'stored' does that; 'inference' computes the front with its normalisation folded into its "
    "convolutions; 'computed' leaves the forward pass as it is. Times are of one mini-batch, measured for the decision."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUse:
    """One decision about the frozen forward pass, and what came of it."""

    decided: CacheDecided
    used: CacheUsed | None
    """The last word on it; None where nothing was stored."""

    @property
    def hit_share(self) -> float | None:
        """Share of the samples that came from the store; None where nothing was stored."""
        if self.used is None or self.used.hits + self.used.misses == 0:
            return None
        return self.used.hits / (self.used.hits + self.used.misses)


def list_uses(history: History) -> tuple[CacheUse, ...]:
    """Return the decisions of a run, oldest first."""
    last = {event.generation: event for event in history.of(CacheUsed)}
    return tuple(
        CacheUse(decided=event, used=last.get(event.generation) if event.mode == "stored" else None)
        for event in history.of(CacheDecided)
    )


def cache_section(history: History) -> str:
    """Return the tables of decisions and of use; nothing for a run that did not ask for the cache."""
    uses = list_uses(history)
    if not uses:
        return ""
    parts = [_decisions(uses), _numbers(uses), _traffic(uses), paragraph(MEANING, "soft")]
    return section("cache", "Activation cache", *parts)


def _decisions(uses: tuple[CacheUse, ...]) -> str:
    columns = (("frozen up to", ""), ("from step", "number"), ("forward pass", ""), ("why", "reason"))
    lines = [
        (use.decided.boundary or "nothing", count(use.decided.step), use.decided.mode, use.decided.reason)
        for use in uses
    ]
    return table("Decisions about the frozen forward pass", columns, lines)


def _numbers(uses: tuple[CacheUse, ...]) -> str:
    weighed = [use.decided for use in uses if use.decided.numbers]
    if not weighed:
        return ""
    times = ("iteration_s", "prefix_s", "serve_s", "read_s", "fill_s")
    columns = (
        ("frozen up to", ""), ("iteration", "number"), ("frozen forward", "number"), ("serving", "number"),
        ("reading", "number"), ("filling", "number"), ("epochs ahead", "number"), ("samples that fit", "number"),
    )  # fmt: skip
    lines = [
        (
            event.boundary,
            *(duration(event.numbers.get(name) or None) for name in times),  # 0 is what was not measured
            f"{event.numbers['epochs_ahead']:.1f}" if "epochs_ahead" in event.numbers else UNKNOWN,
            percent(event.numbers.get("stored_share")),
        )
        for event in weighed
    ]
    return table("What decided", columns, lines)


def _traffic(uses: tuple[CacheUse, ...]) -> str:
    columns = (
        ("frozen up to", ""), ("hits", "number"), ("hit share", "number"), ("mismatches", "number"),
        ("damaged", "number"), ("read", "number"), ("written", "number"), ("on disk", "number"), ("stalls", "number"),
        ("waited", "number"), ("checks", "number"), ("largest error", "number"),
    )  # fmt: skip
    lines = [
        (
            use.used.boundary,
            count(use.used.hits),
            percent(use.hit_share),
            count(use.used.mismatches),
            count(use.used.damaged),
            mebibytes(use.used.bytes_read),
            mebibytes(use.used.bytes_written),
            mebibytes(use.used.size_bytes),
            count(use.used.stalls),
            duration(use.used.stall_s),
            count(use.used.checks),
            f"{use.used.largest_error:.1e}",
        )
        for use in uses
        if use.used is not None
    ]
    return table("What came of it", columns, lines) if lines else ""
