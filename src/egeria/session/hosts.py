"""Which processes of a job share a host, and the directory in which they share stored activations."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from egeria.cache import CacheDirectory, StoreError
from egeria.config import Config
from egeria.journal.recorder import Recorder
from egeria.session.ranks import Ranks, Subject, fingerprint

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SUBDIRECTORY = "cache"
HALF = 2**32


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The processes of a job on one machine, seen from one of them."""

    directory: CacheDirectory
    leads: bool
    """Whether this is the first of them, which makes what the others join."""
    num_hosts: int
    """Of the whole job."""


def place_of(config: Config, recorder: Recorder) -> Path:
    """Return the cache directory of a run: the one that was set, else one beside the journal."""
    if config.cache.directory:
        return Path(config.cache.directory)
    return (recorder.journal.directory or Path()) / SUBDIRECTORY


def share_directory(ranks: Ranks, config: Config, recorder: Recorder) -> tuple[Host | None, str]:
    """Let the processes of each host have one cache directory together; all processes of the job call this.

    Returns:
        What this process is part of, or None and why it is part of nothing.

    Raises:
        OutOfStepError: the processes of the job do not agree.
        LostError: they cannot reach each other.
    """
    rows = ranks.gather(Subject.ATTACHING, (fingerprint(_machine()), float(config.cache.enabled)))
    if not any(enabled for _, enabled in rows):
        return None, ""
    place = Path(ranks.text_from_leader(Subject.ATTACHING, str(place_of(config, recorder).absolute())))
    if config.cache.directory:
        place = Path(config.cache.directory)  # of its own on each host, if it likes
    is_on = all(enabled for _, enabled in rows)
    machines = [machine for machine, _ in rows]
    first = machines.index(machines[ranks.rank])
    num_hosts = len(set(machines))
    if num_hosts > 1:
        place /= f"host-{first}"  # where hosts share a disk, each clears up after its own runs alone
    leads, directory, reason = first == ranks.rank, None, ""
    settings = config.cache
    limits = {"limit_bytes": settings.limit_bytes, "limit_share": settings.limit_share}
    if is_on and leads:
        directory, reason = _enter(place, None, limits)
    token = int(directory.token, 16) if directory else 0
    tokens = ranks.gather(Subject.ATTACHING, (float(directory is not None), float(token // HALF), float(token % HALF)))
    is_there, high, low = tokens[first]
    if is_on and not leads and is_there:
        directory, reason = _enter(place, f"{int(high) * HALF + int(low):016x}", limits)
    if directory is None:
        fallback = "the first process of this host cannot use its directory"
        return None, (reason or fallback) if is_on else "cache.enabled is not set in all processes of the job"
    return Host(directory=directory, leads=leads, num_hosts=num_hosts), ""


def _enter(place: Path, token: str | None, limits: dict[str, float | None]) -> tuple[CacheDirectory | None, str]:
    try:
        return CacheDirectory(place, token=token, **limits), ""  # type: ignore[arg-type]
    except StoreError as error:
        return None, str(error)


def _machine() -> str:
    """Return what tells this machine, or this container on it, from others."""
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
