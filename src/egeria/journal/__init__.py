"""The append-only record of a run: every decision is an event, and reports read nothing else."""

from egeria.journal.reader import FILE_NAME, Journal, read_journal
from egeria.journal.recorder import EgeriaWarning, Recorder, run_directory
from egeria.journal.store import is_url, upload, without_login

__all__ = [
    "FILE_NAME",
    "EgeriaWarning",
    "Journal",
    "Recorder",
    "is_url",
    "read_journal",
    "run_directory",
    "upload",
    "without_login",
]
