"""The report on a run: numbers, a page and lines for the terminal, made from its events alone."""

from dataclasses import dataclass
from pathlib import Path

from egeria.errors import EgeriaError, brief, printable
from egeria.journal import read_journal, replace_file
from egeria.report.summary import Clock, DepthPoint, Metric, Pace, Summary
from egeria.report.text import cautions, headline, verdict

# In each page of ours; those from before there was this element have it in the title.
_MARK = rb'<meta name="generator" content="egeria">|: egeria report</title>'
__all__ = ["Clock", "DepthPoint", "Metric", "Pace", "Report", "Summary", "report"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The report on a run: print it for the short form, open `path` for the page."""

    summary: Summary
    path: Path | None  # the page; None where it could not be written
    message: str  # where the page is, or why there is none

    def __str__(self) -> str:
        summary, rows = self.summary, headline(self.summary)
        width = max(len(label) for label, _ in rows)
        lines = [f"egeria report: {summary.title}, {summary.name}", verdict(summary)]
        lines += [f"  {label:<{width}}  {value}" for label, value in rows]
        lines += [f"  note: {caution}" for caution in cautions(summary)]
        return "\n".join(map(printable, [*lines, self.message]))


def report(directory: str | Path) -> Report:
    """Summarise a run and write `report.html` beside its journal.

    A `report.html` that egeria did not write stays as it is; `path` is None then.

    Args:
        directory: the run's directory, or the journal file in it. The run may still be going on.

    Raises:
        JournalError: there is no journal, or a newer version of egeria wrote it.
    """
    # Drawing takes half a second to import: only those who ask for a report wait for it.
    from egeria.report.page import render_page  # noqa: PLC0415

    journal = read_journal(directory)
    path = journal.directory / "report.html"
    summary = Summary.from_events(journal, path.parent)
    try:
        page = render_page(summary).encode("utf-8", errors="replace")
        replace_file(path, _MARK, lambda file: file.write(page))
    except Exception as error:  # numbers that come from anywhere may not be drawn
        next_step = "Copy the journal to a writable directory."
        is_ours = isinstance(error, EgeriaError)
        message = str(error) if is_ours else f"No page {path}: {brief(error)}. {next_step}"
        return Report(summary=summary, path=None, message=message)
    return Report(summary=summary, path=path, message=f"page: {path}")
