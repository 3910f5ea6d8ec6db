"""Counting what a run may leave behind: processes, threads, shared memory, semaphores, open files; and Ctrl-C."""

import gc
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

import egeria

ROOT = str(Path(egeria.__file__).parent)
SHARED = Path("/dev/shm")


def belongings() -> dict[str, set]:
    """Return everything this process holds that another could trip over."""
    return {
        "processes": {child.pid for child in psutil.Process().children(recursive=True)},
        "threads": {thread.ident for thread in threading.enumerate()},
        "native threads": {thread.id for thread in psutil.Process().threads()},
        "shared memory and semaphores": {entry.name for entry in SHARED.iterdir()} if SHARED.is_dir() else set(),
        "open files": open_files(),
    }


def open_files() -> set[str]:
    """Return the descriptors of this process that lead somewhere."""
    directory = Path("/proc/self/fd")
    found = set()
    for entry in directory.iterdir() if directory.is_dir() else ():
        try:
            found.add(f"{entry.name} {entry.readlink()}")
        except OSError:
            continue  # the one that listed the directory
    return {entry for entry in found if "memfd" in entry or "socket" in entry or "pipe" in entry}


@contextmanager
def nothing_left_behind():
    """Check that the block leaves nothing of its own."""
    before = belongings()
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while (left := _left(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left behind: {left}"


def is_alive(pid: int) -> bool:
    """Tell whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_gone_within(pid: int, seconds: float) -> bool:
    """Wait for a process to end."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


class Interrupter:
    """Counts the lines of the library that run, and raises KeyboardInterrupt at one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __enter__(self) -> "Interrupter":
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame, _event, _argument):
        return self._look if frame.f_code.co_filename.startswith(ROOT) else None

    def _look(self, _frame, event, _argument):
        self.count += event == "line"
        if event == "line" and self.count == self.at:
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._look


def _left(before: dict[str, set]) -> dict[str, set]:
    left = {kind: more for kind, now in belongings().items() if (more := now - before[kind])}
    if shared := left.pop("shared memory and semaphores", set()) - _of_strangers():
        left["shared memory and semaphores"] = shared
    return left


def _of_strangers() -> set[str]:
    """Return the shared memory that processes which are not ours have mapped, such as other tests at the same time.

    A process whose parent has ended may be one of ours that was left behind, so it counts as no stranger.
    """
    own = psutil.Process()
    ours = {own.pid, *(child.pid for child in own.children(recursive=True))}
    found = set()
    for pid in set(psutil.pids()) - ours:
        try:
            is_orphan = psutil.Process(pid).ppid() <= 1
            maps = "" if is_orphan else Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except (OSError, psutil.Error):
            continue
        found |= {line.rpartition(f"{SHARED}/")[2].split()[0] for line in maps.splitlines() if f"{SHARED}/" in line}
    return found
