"""`report`: reads a journal, writes the page, and gives back the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType

from egeria.report.history import read_history
from egeria.report.summary import Summary, summarize
from egeria.report.terminal import panel, plain

PAGE_NAME = "report.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of a run; print it for the short form, open `path` for the long one."""

    summary: Summary
    path: Path | None
    """The page; None where it could not be written."""
    message: str
    """Where the page is, or why there is none."""

    def __str__(self) -> str:
        return plain(self.summary, self.message)

    def __rich__(self) -> RenderableType:
        return panel(self.summary, self.message)


def report(directory: str | Path) -> Report:
    """Summarise a run and write `report.html` beside its journal.

    Args:
        directory: the run's directory, or the journal file in it. The run may still be going on.

    Returns:
        The numbers, and the page's path; a directory that cannot be written costs only the page.

    Raises:
        JournalError: there is no journal, or a newer version of egeria wrote it.
    """
    # Drawing takes half a second to import: only those who ask for a report wait for it.
    from egeria.report.page import render_page  # noqa: PLC0415

    history = read_history(directory)
    summary = summarize(history)
    path = history.directory / PAGE_NAME
    try:
        path.write_text(render_page(history, summary), encoding="utf-8", errors="replace")
    except OSError as error:
        message = (
            f"The page belongs beside the journal; {path} cannot be written: {error}. "
            f"Make the directory writable, or copy the journal to one that is."
        )
        return Report(summary=summary, path=None, message=message)
    return Report(summary=summary, path=path, message=f"page: {path}")
