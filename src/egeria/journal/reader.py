"""Reading: the events of a journal in order; torn or unknown lines are counted and left out."""

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
    num_damaged: int
    """Lines that could not be read: at most one per crash of the run that wrote them."""

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
    """Read the journal of a run.

    Args:
        directory: the run's directory, or the journal file itself; also the URL of a directory.

    Raises:
        JournalError: there is no journal, or a newer version of egeria wrote it.
    """
    path, text = _read(directory)
    events: list[Event] = []
    damaged = 0
    for line in filter(str.strip, text.split("\n")):
        record = _parse(line)
        if record.get("event") == "journal_opened":
            _check_schema(record.get("schema_version"), path)
        elif (event := _event(record)) is None:
            damaged += 1
        else:
            events.append(event)
    return Journal(directory=path.parent, events=tuple(events), num_damaged=damaged)


def _read(directory: str | Path) -> tuple[Path, str]:
    """Return the file of a journal, or where it would be on this host, and its text."""
    place: object = directory
    try:
        if is_url(directory):
            place = url = str(directory)
            content = download(url, FILE_NAME).decode("utf-8", errors="replace")
            if not content:
                raise FileNotFoundError(f"there is no {FILE_NAME} in {url}")
            return local_directory(url, RUNS) / FILE_NAME, content
        path = Path(directory)
        place = path = path / FILE_NAME if path.is_dir() else path
        return path, path.read_text(encoding="utf-8", errors="replace")
    except Exception as error:
        raise JournalError(
            f"A run's directory holds a {FILE_NAME}; {place} cannot be read: {error}. "
            f"Give the directory that `attach` was given, or that `run.directory` names."
        ) from error


def _parse(line: str) -> dict[str, Any]:
    """Return the object on a line, empty where there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _check_schema(version: object, path: Path) -> None:
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise JournalError(
            f"This egeria reads journals up to schema {SCHEMA_VERSION}; {path} has schema "
            f"{version!r}. "
            f"Read it with the egeria that wrote it, or a newer one."
        )


def _event(record: dict[str, Any]) -> Event | None:
    name = record.get("event")
    kind = EVENT_TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        return None
    names = {field.name for field in dataclasses.fields(kind)}
    try:
        return kind(**{name: value for name, value in record.items() if name in names})
    except TypeError:
        return None


WITH_FOLDERS = ("file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs")
"""Protocols of fsspec by which a folder must be made before there can be a file in it."""


def is_url(place: object) -> bool:
    """Return whether a run's directory is somewhere that fsspec reaches, such as
    's3://bucket/run'.
    """
    return isinstance(place, str) and "://" in place


def local_directory(url: str, runs: Path) -> Path:
    """Return where a run is kept on this host whose directory is a URL: always the same, so that it
    can go on.
    """
    url = url.rstrip("/")
    digest = hashlib.blake2b(url.encode(), digest_size=4).hexdigest()
    return runs / f"{url.rsplit('/', 1)[-1]}-{digest}"


def without_login(url: str) -> str:
    """Return a URL as it may be told: without a name and a password."""
    return re.sub(r"://[^/@]*@", "://", url)


def download(url: str, name: str) -> bytes:
    """Return a file of a directory that fsspec reaches; empty where there is none.

    Raises:
        Exception: of the store's own kind: it cannot be reached, or one may not.
    """
    store, root = _find(url)
    store.invalidate_cache()
    try:  # not `exists`, which takes every failure for no
        content: bytes = store.cat_file(f"{root}/{name}")
    except FileNotFoundError:
        return b""
    return content


def upload(paths: Iterable[Path], url: str) -> None:
    """Copy files to a directory that fsspec reaches; folders among them are left out.

    Raises:
        Exception: of the store's own kind.
    """
    store, root = _find(url)
    if url.split("://", 1)[0] in WITH_FOLDERS:
        store.makedirs(root, exist_ok=True)
    for path in filter(Path.is_file, paths):
        store.put_file(str(path), f"{root}/{path.name}")


def _find(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # noqa: PLC0415 (only where a URL was given)

    store, root = url_to_fs(url.rstrip("/"))
    return store, root
