"""Reading a journal, from a directory of this host or of a store that fsspec reaches."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from egeria.errors import JournalError
from egeria.events import EVENT_TYPES, SCHEMA_VERSION, Event

FILE_NAME = "journal.jsonl"
RUNS = Path("egeria_runs")
Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """The events of a run, oldest first."""

    directory: Path
    events: tuple[Event, ...]
    num_damaged: int  # lines that could not be read: at most one per crash of the run

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def first(self, kind: type[Kind]) -> Kind | None:
        """Return the first event of one kind, or None."""
        return next(iter(self.of(kind)), None)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)


def read_journal(directory: str | Path) -> Journal:
    """Read the journal of a run; lines that are torn or unknown are counted and left out.

    Args:
        directory: the run's directory, or the journal file itself; also the URL of a directory.

    Raises:
        JournalError: there is no journal, or a newer version of egeria wrote it.
    """
    path, text = _read(directory)
    events, damaged = list[Event](), 0
    for line in filter(str.strip, text.split("\n")):
        try:
            record = json.loads(line)
            if record["event"] == "journal_opened":
                version = record.get("schema_version")
                if not isinstance(version, int) or version > SCHEMA_VERSION:
                    known = f"This egeria reads journals up to schema {SCHEMA_VERSION}"
                    raise JournalError(f"{known}, {path} has schema {version!r}. Use a newer one.")
                continue
            kind = EVENT_TYPES[record["event"]]
            names = {field.name for field in dataclasses.fields(kind)}
            events.append(kind(**{key: value for key, value in record.items() if key in names}))
        except (LookupError, TypeError, ValueError, RecursionError):
            damaged += 1
    return Journal(directory=path.parent, events=tuple(events), num_damaged=damaged)


def _read(directory: str | Path) -> tuple[Path, str]:
    """Return where a journal is, or would be on this host, and its text."""
    place: object = directory
    try:
        if is_url(directory):
            content = download(str(directory), FILE_NAME).decode("utf-8", errors="replace")
            if not content:
                raise FileNotFoundError(f"there is no {FILE_NAME} in {directory}")
            return local_directory(str(directory)) / FILE_NAME, content
        path = Path(directory)
        place = path = path / FILE_NAME if path.is_dir() else path
        return path, path.read_text(encoding="utf-8", errors="replace")
    except Exception as error:
        raise JournalError(
            f"A run's directory holds a {FILE_NAME}; {place} cannot be read: {error}. "
            "Give the directory that `attach` was given, or that `run.directory` names."
        ) from error


WITH_FOLDERS = ("file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs")
"""Protocols of fsspec by which a folder must be made before there can be a file in it."""


def is_url(place: object) -> bool:
    """Return whether a directory is of a store that fsspec reaches, such as 's3://bucket/run'."""
    return isinstance(place, str) and "://" in place


def local_directory(url: str) -> Path:
    """Return where a run whose directory is a URL is kept on this host."""
    digest = hashlib.blake2b(url.rstrip("/").encode(), digest_size=4).hexdigest()
    return RUNS / f"{url.rstrip('/').rsplit('/', 1)[-1]}-{digest}"


def without_login(url: str) -> str:
    """Return a text with its URLs as they may be shown: without name and password."""
    return re.sub(r"://[^/@]*@", "://", url)


def download(url: str, name: str) -> bytes:
    """Return a file of a directory in a store; empty where there is none."""
    store, root = _find(url)
    store.invalidate_cache()
    try:  # not `exists`, which takes every failure for no
        content: bytes = store.cat_file(f"{root}/{name}")
    except FileNotFoundError:
        return b""
    return content


def upload(paths: Iterable[Path], url: str) -> None:
    """Copy files, but not folders, to a directory in a store."""
    store, root = _find(url)
    if url.split("://", 1)[0] in WITH_FOLDERS:
        store.makedirs(root, exist_ok=True)
    for path in filter(Path.is_file, paths):
        store.put_file(str(path), f"{root}/{path.name}")


def _find(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # noqa: PLC0415 (only where a URL was given)

    store, root = url_to_fs(url.rstrip("/"))
    return store, root
