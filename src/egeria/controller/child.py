"""The controller process as the training process holds it: the messages, starting, watching and
ending it.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from egeria.controller.protocol import Report, Ticket
from egeria.controller.shared_memory import Segment, Slot

END_S = 1.0
LAST_BYTES = 4096
LONGEST_WORK = 10

# Spinning threads of two processes on the same cores slow both down 10 to 100 times; and the
# accelerator, with the memory a context takes on it, belongs to the training alone.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """To the process: new weights, and a batch to calibrate on, lie in the snapshot queue."""

    evaluation: int
    slot: Slot
    model_bytes: int | None
    """Size of the evaluation plan and the model without its weights; None where the process has
    them."""
    precision: str
    """The number format that a new model begins with."""


@dataclass(frozen=True, slots=True)
class TakeEvaluation:
    """To the process: a batch and the training model's output for it lie in the
    evaluation queue.
    """

    ticket: Ticket
    slot: Slot


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """From the process: it computes, or waits for the machine to have room."""


@dataclass(frozen=True, slots=True)
class Freed:
    """From the process: a slot of a queue is free again."""

    queue: str
    number: int


@dataclass(frozen=True, slots=True)
class Unusable:
    """From the process: the model cannot be rebuilt there."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reports:
    """From the process: what came of a message, or nothing when it is ready; and its CPU time so
    far.
    """

    reports: tuple[Report, ...]
    cpu_s: float


class Child:
    """A fresh interpreter that runs `egeria.controller.worker.main` at the other end of a pipe.

    Started by its own command line and not by `multiprocessing`, which would run the user's script
    again: a script without `__main__` guard and a notebook need nothing. It inherits the pipe and
    the shared memory, has no name anywhere, and ends when its parent does.

    It answers each message with `Reports`. Until then it may be silent for `timeout_s`; one that
    computes is alive, but nothing may take it more than ten times as long.
    """

    def __init__(self, settings: Mapping[str, Any], timeout_s: float) -> None:
        self.is_ready = False
        """Whether it has imported what it needs."""
        self.num_owed = 1
        """Messages that it has not answered yet; the first is that it is ready."""
        self.cpu_s, self._timeout_s, self._reads = 0.0, timeout_s, True
        self._alive_at_s = self._worked_at_s = time.monotonic()
        self._pipe, theirs = multiprocessing.Pipe()
        self._stderr = Segment()
        with theirs:
            arguments = {**settings, "pipe": theirs.fileno(), "parent": os.getpid()}
            program = (
                f"import sys; sys.path[:] = {[os.fspath(entry) for entry in sys.path]!r}; "
                f"from egeria.controller.worker import main; main(**{arguments!r})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[
                    theirs.fileno(),
                    *itertools.chain.from_iterable(settings["memory"].values()),
                ],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr.descriptor,
            )
        self.pid = self._process.pid
        self._finalizer = weakref.finalize(self, _end, self._process, self._pipe, os.getpid())

    def send(self, message: TakeSnapshot | TakeEvaluation) -> None:
        """Send a message; where that is not possible without waiting, `receive`
        returns the fault.
        """
        if not self.num_owed:
            self._alive_at_s = self._worked_at_s = time.monotonic()
        self.num_owed += 1
        try:
            self._reads = self._reads and is_writable(self._pipe)
            if self._reads:
                self._pipe.send(message)
        except Exception:
            self._reads = False

    def receive(self) -> tuple[list[Freed | Unusable | Reports], str]:
        """Return what has arrived, and why the process is to be replaced; ""
        where it need not be.
        """
        messages: list[Freed | Unusable | Reports] = []
        try:
            while self._pipe.poll(0):
                message, self._alive_at_s = self._pipe.recv(), time.monotonic()
                if isinstance(message, Heartbeat):
                    continue
                messages.append(message)
                self._worked_at_s = self._alive_at_s
                if isinstance(message, Reports):
                    self.is_ready, self.cpu_s = True, message.cpu_s
                    self.num_owed -= 1
        except (EOFError, OSError):
            return messages, "it died"
        if not messages and self._process.poll() is not None:
            return messages, "it died"
        if not self._reads:
            return messages, "it does not read its messages"
        now, longest_s = time.monotonic(), LONGEST_WORK * self._timeout_s
        silence_s = self._timeout_s if self.is_ready else longest_s  # no heartbeat while it imports
        is_late = now - self._alive_at_s > silence_s or now - self._worked_at_s > longest_s
        return (
            messages,
            f"it gave no sign of life for {self._timeout_s:g} s"
            if is_late and self.num_owed
            else "",
        )

    def end(self) -> str:
        """End the process and return its exit status and the last line it wrote."""
        if self._finalizer() is None:
            return "with the training process"
        size_bytes = os.fstat(self._stderr.descriptor).st_size
        written = os.pread(self._stderr.descriptor, LAST_BYTES, max(0, size_bytes - LAST_BYTES))
        self._stderr.close()
        lines = written.decode(errors="replace").strip().splitlines()
        status = f"status {self._process.returncode}"
        return f"{status}: {lines[-1][:300]}" if lines else status


def is_writable(pipe: Any) -> bool:
    """Return whether a message can be sent without waiting."""
    writable = select.poll()  # `select` knows no descriptors above 1024
    writable.register(pipe.fileno(), select.POLLOUT)
    return any(event & select.POLLOUT for _, event in writable.poll(0))


def _end(process: subprocess.Popen[bytes], pipe: Any, owner: int) -> bool:
    """Close the pipe, wait a moment, kill: the child holds nothing that could be lost."""
    if os.getpid() != owner:
        return False  # a forked data worker has inherited this object, not the child
    with contextlib.suppress(OSError):
        pipe.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    return True
