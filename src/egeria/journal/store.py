"""A run whose directory is a URL: the journal is written to a local one, and its copy there follows
behind.

An object store has no files to append to, and is away at times. So the whole journal is copied
every few seconds where it has grown, by a thread of its own, and what could not be copied is with
the next.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

EVERY_S = 10.0
LAST_S = 20.0
"""Seconds that the end of a run waits for the store at most."""
RETRY_S = 1.0
HOPELESS = (ImportError, ValueError, PermissionError)
"""What trying again will not mend: no package for the protocol, no such protocol, no right."""
AT_THE_END = "shutdown"
"""In what stores say once the interpreter ends, and threads and connections can no longer be
made."""
WITH_FOLDERS = frozenset({"file", "local", "memory", "sftp", "ssh", "smb", "hdfs", "webhdfs"})
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


def read_bytes(url: str) -> bytes:
    """Return a file that fsspec reaches; empty where there is none.

    Raises:
        Exception: of the store's own kind: it cannot be reached, or one may not.
    """
    store, key = _find(url)
    store.invalidate_cache()
    try:  # not `exists`, which takes every failure for no
        content: bytes = store.cat_file(key)
    except FileNotFoundError:
        return b""
    return content


def without_login(url: str) -> str:
    """Return a URL as it may be told: without a name and a password."""
    return re.sub(r"://[^/@]*@", "://", url)


def write_bytes(url: str, content: bytes) -> None:
    """Write a file that fsspec reaches, in one piece where the store does that.

    Raises:
        Exception: of the store's own kind.
    """
    store, key = _find(url)
    names = {store.protocol} if isinstance(store.protocol, str) else set(store.protocol)
    if names & WITH_FOLDERS:
        store.makedirs(store._parent(key), exist_ok=True)
    store.pipe_file(key, content)


def _find(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs  # noqa: PLC0415 (only where a URL was given)

    found: tuple[Any, str] = url_to_fs(url)
    return found


class JournalCopy:
    """Keeps a file in a store like one that grows on this host.

    What is in the store already, of the processes before this one, stays in front of what this one
    writes.

    Args:
        path: the file; what it holds now is of processes before this one.
        url: of the copy.
        every_s: seconds between two looks at whether it has grown.
    """

    def __init__(self, path: Path, url: str, every_s: float = EVERY_S) -> None:
        self.url = without_login(url)
        """As it may be told."""
        self._url, self._path, self._every_s = url, path, every_s
        self._earlier = path.read_bytes() if path.exists() else b""
        self._before: bytes | None = None
        """What stands in front of the copy; None before the store was reached."""
        self._skipped = 0
        """Bytes of the file, from its beginning, that are in there."""
        self._copied = -1
        """Bytes of the file that have been copied."""
        self._error, self._is_hopeless = "", False
        self._failed_s: float | None = None
        """When the store was first found to be away; None while it is there."""
        self._news: deque[tuple[str, float]] = deque()
        self._wake, self._is_closing = threading.Event(), False
        self._thread = threading.Thread(target=self._follow, name="egeria-journal", daemon=True)

    def start(self) -> None:
        """Begin to follow the file."""
        self._thread.start()

    def news(self) -> tuple[str, float] | None:
        """Return what has changed and was not told yet: why the store is away, or '' and how many
        seconds it was.
        """
        return self._news.popleft() if self._news else None

    def close(self) -> str:
        """Copy what is left, for `LAST_S` at most; return why that was not possible, or ''."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(LAST_S)
        if self._thread.is_alive():
            return f"it did not answer for {LAST_S:.0f} s"
        return "" if self._failed_s is None else self._error

    def _follow(self) -> None:
        last_s = None
        while True:
            self._wake.wait(RETRY_S if self._is_closing else self._every_s)
            if self._is_closing and last_s is None:
                last_s = time.monotonic() + LAST_S - RETRY_S
                self._wake.clear()
            is_copied = self._copy()
            if last_s is not None and (is_copied or self._is_hopeless or time.monotonic() > last_s):
                return

    def _copy(self) -> bool:
        """Copy the file if it has grown; return whether the store has all of it."""
        try:
            content = self._path.read_bytes()
            if len(content) == self._copied:
                return True
            if self._before is None:
                self._before, self._skipped = _front(read_bytes(self._url), self._earlier)
            write_bytes(self._url, self._before + content[self._skipped :])
        except Exception as error:
            self._error = without_login(f"{type(error).__name__}: {error}")
            self._is_hopeless = isinstance(error, HOPELESS) or AT_THE_END in str(error)
            if self._failed_s is None:
                self._failed_s = time.monotonic()
                self._news.append((self._error, 0.0))
            return False
        self._copied = len(content)
        if self._failed_s is not None:
            self._news.append(("", time.monotonic() - self._failed_s))
            self._failed_s = None
        return True


def _front(stored: bytes, earlier: bytes) -> tuple[bytes, int]:
    """Return what stands in front of a copy, and how many bytes of the file here it stands for.

    Args:
        stored: what the store has.
        earlier: what the file here had before this process.
    """
    if earlier.startswith(stored):
        return b"", 0
    if stored and not stored.endswith(b"\n"):
        stored += b"\n"
    known = set(stored.split(b"\n"))
    own = [
        line for line in earlier.split(b"\n") if line not in known
    ]  # each has the time at which it was written
    return stored + b"".join(line + b"\n" for line in own), len(earlier)
