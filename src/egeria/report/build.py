"""`report`: reads a journal, writes the page, and returns the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from egeria.journal import is_url, upload, without_login
from egeria.report.history import read_history
from egeria.report.summary import Clock, Summary, summarize
from egeria.report.wording import (
    cautions,
    duration,
    frozen_when,
    number,
    percent,
    printable,
    progress,
    verdict,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

PAGE_NAME = "report.html"
MAX_METRICS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of a run; print it for the short form, open `path` for the long one."""

    summary: Summary
    path: Path | None
    """The page; None where it could not be written."""
    message: str
    """Where the page is, or why there is none."""

    def __str__(self) -> str:
        rows = _rows(self.summary)
        width = max(len(label) for label, _ in rows)
        return "\n".join(
            [
                f"egeria report: {printable(self.summary.title)}, {printable(self.summary.name)}",
                printable(verdict(self.summary)),
                *(f"  {label:<{width}}  {value}" for label, value in rows),
                *(f"  note: {printable(caution)}" for caution in cautions(self.summary)),
                self.message,
            ]
        )

    def __rich__(self) -> RenderableType:
        from rich.console import Group  # noqa: PLC0415  (only those who print to a rich console wait for it)
        from rich.panel import Panel  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table.grid(padding=(0, 2))
        for label, value in _rows(self.summary):
            # `Text`, not markup: a module may be called [red].
            table.add_row(Text(label, style="dim"), Text(value))
        notes = [
            Text(f"• {printable(caution)}", style="yellow") for caution in cautions(self.summary)
        ]
        found = Text(printable(verdict(self.summary)), style="bold")
        return Panel(
            Group(found, Text(), table, *notes, Text(self.message, style="dim")),
            title=Text(f"egeria: {printable(self.summary.title)}, {printable(self.summary.name)}"),
            title_align="left",
            expand=False,
        )


def report(directory: str | Path) -> Report:
    """Summarise a run and write `report.html` beside its journal.

    Args:
        directory: the run's directory, or the journal file in it; also the URL of a directory,
            which gets the page too. The run may still be going on.

    Returns:
        The numbers, and the page's path; a directory that cannot be written costs only the page.

    Raises:
        JournalError: there is no journal, or a newer version of egeria wrote it.
    """
    # Drawing takes half a second to import: only those who ask for a report wait for it.
    from egeria.report.page import render_page  # noqa: PLC0415

    summary = summarize(read_history(directory))
    path = summary.history.directory / PAGE_NAME
    page = render_page(summary).encode("utf-8", errors="replace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # of a URL there may be none here yet
        path.write_bytes(page)
    except OSError as error:
        message = (
            f"The page belongs beside the journal; {path} cannot be written: {error}. "
            f"Make the directory writable, or copy the journal to one that is."
        )
        return Report(summary=summary, path=None, message=message)
    message = f"page: {path}"
    if is_url(directory):
        url = f"{str(directory).rstrip('/')}/{PAGE_NAME}"
        try:
            upload([path], str(directory))
            message += f", and {without_login(url)}"
        except Exception as error:  # of the store's own kind
            message += without_login(f"; {url} cannot be written: {error}")
    return Report(summary=summary, path=path, message=message)


def write_files(directory: str | Path, into: Path) -> None:
    """Write the report of a run as files for a tracker: the page, and each of its pictures as an
    SVG.

    Raises:
        JournalError: there is no journal, or a newer version of egeria wrote it.
        OSError: they cannot be written.
    """
    from egeria.report.page import render_page  # noqa: PLC0415
    from egeria.report.pictures import draw_pictures  # noqa: PLC0415
    from egeria.report.svg import as_file  # noqa: PLC0415

    summary = summarize(read_history(directory))
    (into / PAGE_NAME).write_text(render_page(summary), encoding="utf-8", errors="replace")
    for picture in draw_pictures(summary):
        name = picture.title.lower().replace(" ", "-")
        (into / f"{name}.svg").write_text(as_file(picture.svg), encoding="utf-8", errors="replace")


def _rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the headline numbers, each under its name."""
    of_modules = f" of {len(summary.modules)} modules" if summary.modules else ""
    now, mean = percent(summary.depths[-1].parameter_share), percent(summary.mean_parameter_share)
    skipped = percent(summary.mean_skipped_share)
    rows = [
        ("progress", f"{progress(summary)}, {summary.stage}"),
        ("time saved, wall", _saved(summary.wall)),
        ("time saved, CPU", _saved(summary.cpu)),
        ("egeria's overhead", f"{percent(summary.wall.overhead_share)} of training time"),
        (
            f"frozen {frozen_when(summary)}",
            f"{summary.frozen_now}{of_modules} ({now} of parameters)",
        ),
        ("mean over the run", f"{mean} of parameters frozen, {skipped} of compute skipped"),
    ]
    rows += [
        (m.name, f"{number(m.final)} (best {number(m.best)})")
        for m in summary.metrics[:MAX_METRICS]
    ]
    return [(printable(label), printable(value)) for label, value in rows]


def _saved(clock: Clock) -> str:
    if clock.saved_s is None:
        return "not known: nothing ran unfrozen to compare with"
    return f"{percent(clock.saved_share, signed=True)} ({duration(clock.saved_s)})"
