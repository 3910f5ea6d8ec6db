"""A run whose directory is a URL: it is kept on this host, and copied to the store."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
