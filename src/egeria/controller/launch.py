"""The controller process as the training process holds it: the messages, starting, watching and ending it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from egeria.config import ControllerConfig
from egeria.controller.protocol import Report, Ticket
from egeria.controller.shared_memory import Segment, Slot

END_S = 1.0
LAST_BYTES = 4096
RESTARTS_WITHOUT_A_READING = 10
ATTEMPTS_TO_START = 3
LONGEST_WORK = 10

# Spinning threads of two processes on the same cores slow both down 10 to 100 times; and the
# accelerator, with the memory a context takes on it, belongs to the training alone.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}

# --- messages to the controller process, in the order they are worked through ------------------


@dataclass(frozen=True, slots=True)
class TakeModel:
    """The model as it is built, and the evaluation plan, lie in the model queue."""

    slot: Slot
    precision: str
    """The number format to begin with."""


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """New weights, and a batch to calibrate on, lie in the snapshot queue."""

    evaluation: int
    slot: Slot


@dataclass(frozen=True, slots=True)
class TakeEvaluation:
    """A batch and the training model's output for it lie in the evaluation queue."""

    ticket: Ticket
    slot: Slot


ToController = TakeModel | TakeSnapshot | TakeEvaluation

# --- messages to the training process ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The controller process has imported what it needs."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The controller process computes, or waits for the machine to have room."""


@dataclass(frozen=True, slots=True)
class Freed:
    """A slot of a queue is free again."""

    queue: str
    number: int


@dataclass(frozen=True, slots=True)
class Unusable:
    """The model cannot be rebuilt in the controller process."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reports:
    """What happened; `cpu_s` is the CPU time of the controller process so far."""

    reports: tuple[Report, ...]
    cpu_s: float


FromController = Ready | Heartbeat | Freed | Unusable | Reports


class Child:
    """A fresh interpreter that serves, at the other end of a pipe.

    Started by its own command line and not by `multiprocessing`, which would run the user's script
    again: a script without `__main__` guard and a notebook need nothing. It inherits the pipe and the
    shared memory, has no name anywhere, and ends when its parent does.

    Args:
        settings: what `egeria.controller.worker.main` takes, without the pipe and the parent.
        descriptors: what it inherits besides the pipe.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, settings: Mapping[str, Any], descriptors: list[int]) -> None:
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
                pass_fds=[theirs.fileno(), *descriptors],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr.descriptor,
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._pipe, os.getpid())

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def send(self, message: ToController) -> None:
        """Send a message, if it is possible without waiting.

        Raises:
            OSError: the other end is gone, or does not read.
        """
        if not is_writable(self._pipe):
            raise BlockingIOError("the controller does not read its messages")
        self._pipe.send(message)

    def receive(self) -> list[FromController]:
        """Return the messages that have arrived.

        Raises:
            EOFError, OSError: the other end is gone, and has left no message.
        """
        messages = []
        try:
            while self._pipe.poll(0):
                messages.append(self._pipe.recv())
            if not messages and self._process.poll() is not None:
                raise EOFError
        except (EOFError, OSError):
            if not messages:
                raise
        return messages

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


class Watchdog:
    """Decides when the process counts as lost, and counts how often it is replaced.

    One that computes is alive, but nothing may take it more than ten times `timeout_s`.

    Args:
        config: `timeout_s` and `restarts`.
        clock: seconds.
    """

    def __init__(self, config: ControllerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_ready = False
        """Whether the process has imported what it needs."""
        self.num_restarts = 0
        self._config = config
        self._clock = clock
        self._alive_at_s = self._worked_at_s = clock()
        self._num_without_reading = 0
        self._was_ready = False

    def note_start(self) -> None:
        """Note that a process was started."""
        self.is_ready = False
        self.note_work()

    def note_ready(self) -> None:
        """Note that it has imported what it needs."""
        self.is_ready = self._was_ready = True

    def note_work(self) -> None:
        """Note that it has done something, or that there was nothing to do."""
        self._alive_at_s = self._worked_at_s = self._clock()

    def note_heartbeat(self) -> None:
        """Note that it is alive."""
        self._alive_at_s = self._clock()

    def note_reading(self) -> None:
        """Note that it has made an evaluation."""
        self._num_without_reading = 0

    @property
    def is_lost(self) -> bool:
        """Whether it has been silent, or without a result, for too long, given that it has work."""
        now, limit_s = self._clock(), self._config.timeout_s
        silence_s = limit_s if self.is_ready else LONGEST_WORK * limit_s  # no heartbeat before it is ready
        return now - self._alive_at_s > silence_s or now - self._worked_at_s > LONGEST_WORK * limit_s

    @property
    def never_came_up(self) -> bool:
        """Whether no process has come up, however often it was tried."""
        return not self._was_ready and self._num_without_reading == ATTEMPTS_TO_START

    def allow_restart(self) -> bool:
        """Count a restart; return False where it would be one too many, in the run or without a reading between."""
        self.num_restarts += 1
        self._num_without_reading += 1
        few_in_a_row = self._num_without_reading <= RESTARTS_WITHOUT_A_READING
        return few_in_a_row and self.num_restarts <= self._config.restarts
