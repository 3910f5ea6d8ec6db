"""The report in a terminal: a small table and what to know about it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from egeria.report.summary import Summary
from egeria.report.words import cautions, duration, frozen_now, number, percent, printable, progress, verdict

MAX_METRICS = 4


def rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the headline numbers, each under its name."""
    found = [
        ("progress", f"{progress(summary)}, {summary.stage}"),
        ("time saved, wall", _saved(summary.wall.saved_share, summary.wall.saved_s)),
        ("time saved, CPU", _saved(summary.cpu.saved_share, summary.cpu.saved_s)),
        ("egeria's overhead", f"{percent(summary.wall.overhead_share)} of training time"),
        ("frozen now", f"{frozen_now(summary)} ({percent(summary.depths[-1].parameter_share)} of parameters)"),
        (
            "mean over the run",
            f"{percent(summary.mean_parameter_share)} of parameters frozen, "
            f"{percent(summary.mean_skipped_share)} of compute skipped",
        ),
    ]
    for metric in summary.metrics[:MAX_METRICS]:
        found.append((metric.name, f"{number(metric.final)} (best {number(metric.best)})"))
    return [(printable(label), printable(value)) for label, value in found]


def plain(summary: Summary, closing: str) -> str:
    """Return the report as lines of text."""
    table = rows(summary)
    width = max(len(label) for label, _ in table)
    return "\n".join(
        [
            f"egeria report: {printable(summary.name)}",
            printable(verdict(summary)),
            *(f"  {label:<{width}}  {value}" for label, value in table),
            *(f"  note: {printable(caution)}" for caution in cautions(summary)),
            closing,
        ]
    )


def panel(summary: Summary, closing: str) -> RenderableType:
    """Return the report for a rich console."""
    table = Table.grid(padding=(0, 2))
    for label, value in rows(summary):
        # `Text`, not markup: a module may be called [red].
        table.add_row(Text(label, style="dim"), Text(value))
    notes = [Text(f"• {printable(caution)}", style="yellow") for caution in cautions(summary)]
    return Panel(
        Group(Text(printable(verdict(summary)), style="bold"), Text(), table, *notes, Text(closing, style="dim")),
        title=Text(f"egeria: {printable(summary.name)}"),
        title_align="left",
        expand=False,
    )


def _saved(share: float | None, seconds: float | None) -> str:
    if seconds is None:
        return "not known: nothing ran unfrozen to compare with"
    return f"{percent(share, signed=True)} ({duration(seconds)})"
