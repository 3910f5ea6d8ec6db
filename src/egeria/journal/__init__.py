"""The append-only record of a run: every decision is an event, and reports read nothing else."""

from egeria.journal.reader import Journal, read_journal
from egeria.journal.writer import JournalWriter

__all__ = ["Journal", "JournalWriter", "read_journal"]
