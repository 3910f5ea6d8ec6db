"""Starting and ending the controller process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from egeria.controller.memory import Segment
from egeria.controller.messages import FromController, ToController

END_S = 1.0
LAST_BYTES = 4096

# Spinning threads of two processes on the same cores slow both down 10 to 100 times; and the
# accelerator, with the memory a context takes on it, belongs to the training alone.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class Child:
    """A fresh interpreter that serves, at the other end of a pipe.

    Started by its own command line and not by `multiprocessing`, which would run the user's script
    again: a script without `__main__` guard and a notebook need nothing. It inherits the pipe and the
    shared memory, has no name anywhere, and ends when its parent does.

    Args:
        orders: what `egeria.controller.child.main` takes, without the pipe and the parent.
        descriptors: what it inherits besides the pipe.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, orders: Mapping[str, Any], descriptors: list[int]) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._said = Segment()
        with theirs:
            settings = {**orders, "pipe": theirs.fileno(), "parent": os.getpid()}
            program = (
                f"import sys; sys.path[:] = {[os.fspath(entry) for entry in sys.path]!r}; "
                f"from egeria.controller.child import main; main(**{settings!r})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno(), *descriptors],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said.descriptor,
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
        writable = select.poll()  # `select` knows no descriptors above 1024
        writable.register(self._pipe.fileno(), select.POLLOUT)
        if not any(event & select.POLLOUT for _, event in writable.poll(0)):
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
        """End the process and return how it went: its exit status and the last line it said."""
        if self._finalizer() is None:
            return "with the training process"
        size_bytes = os.fstat(self._said.descriptor).st_size
        said = os.pread(self._said.descriptor, LAST_BYTES, max(0, size_bytes - LAST_BYTES))
        self._said.close()
        lines = said.decode(errors="replace").strip().splitlines()
        status = f"status {self._process.returncode}"
        return f"{status}: {lines[-1][:300]}" if lines else status


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
