"""The append-only record of a run: every decision is an event, and reports read nothing else."""

from egeria.journal.reader import FILE_NAME, Journal, is_url, read_journal, upload, without_login
from egeria.journal.recorder import EgeriaWarning, Recorder, run_directory

__all__ = ["FILE_NAME", "EgeriaWarning", "Journal", "Recorder", "is_url", "read_journal"]
__all__ += ["run_directory", "upload", "without_login"]
