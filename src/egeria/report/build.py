"""`report`: reads a journal, writes the page, and returns the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from egeria.journal import is_url, read_journal, upload, without_login
from egeria.report.summary import Summary
from egeria.report.text import cautions, headline, verdict
from egeria.report.wording import printable

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
        rows = headline(self.summary)
        width = max(len(label) for label, _ in rows)
        lines = [
            f"egeria report: {self.summary.title}, {self.summary.name}",
            verdict(self.summary),
            *(f"  {label:<{width}}  {value}" for label, value in rows),
            *(f"  note: {caution}" for caution in cautions(self.summary)),
        ]
        return "\n".join([*map(printable, lines), self.message])


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
    summary = Summary.from_journal(read_journal(directory))
    path = summary.directory / PAGE_NAME
    page = _page(summary)
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
    """Write the page of a run for trackers that take files.

    Raises:
        JournalError: there is no journal, or a newer version of egeria wrote it.
        OSError: it cannot be written.
    """
    (into / PAGE_NAME).write_bytes(_page(Summary.from_journal(read_journal(directory))))


def _page(summary: Summary) -> bytes:
    # Drawing takes half a second to import: only those who ask for a report wait for it.
    from egeria.report.page import render_page  # noqa: PLC0415

    return render_page(summary).encode("utf-8", errors="replace")
