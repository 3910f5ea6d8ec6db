"""The controller in a process of its own, what runs in that process, and when it is used.

Both processes share nameless files in memory, so that nothing is left behind however they end.
Classes of the user's script are sent by value (cloudpickle): the script is never run again.
"""

import contextlib
import copyreg
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import psutil
import torch
from torch import Tensor, nn

from egeria.controller.inline import Answer, Controller, InlineController, Reports, Saved, Ticket
from egeria.errors import brief
from egeria.events import Declined
from egeria.model.hooks import without_watchers
from egeria.model.passes import Batch
from egeria.random_state import random_states, set_random_states

START_S, END_S = 60.0, 5.0  # more time for the start: importing torch on a busy machine
QUEUE_LENGTH = 4  # evaluations that may wait, beside one snapshot
PATIENT_SHARE = 12  # an evaluation waits up to 1/12 of the timeout for idle processors
WATCH_EVERY_S, LOOK_EVERY_S = 0.5, 0.2

# Spinning threads of two processes on the same cores slow both down 10 to 100 times. The
# accelerator, and the memory of a context on it, are for the training alone.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class ProcessController(Controller):
    """Evaluates in a child process: the training sends and polls, and never waits.

    One queue replaces the paper's three, since the batch and the training output of an evaluation
    are known at the same moment. The process is started with the first snapshot. If it cannot be
    started, dies, hangs or refuses, what it has not answered is lost, and the training process
    evaluates from the next refresh on.

    Args:
        settings: arguments of `InlineController`.
        timeout_s: seconds without an answer after which the process is given up.
        load_limit: load of the processors above which it waits, at most a twelfth of the timeout.
    """

    def __init__(self, settings: tuple[Any, ...], timeout_s: float, load_limit: float) -> None:
        self._settings, self._timeout_s, self._load_limit = settings, timeout_s, load_limit
        # For a snapshot, for evaluations, and for what the process prints.
        self._files = [os.memfd_create("egeria") for _ in range(1 + QUEUE_LENGTH + 1)]
        self._held = contextlib.ExitStack()
        for file in self._files:
            self._held.callback(os.close, file)
        self._release = weakref.finalize(self, self._held.close)
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None
        self._inline: InlineController | None = None
        # The file and its evaluation, None for a snapshot.
        self._unanswered: deque[tuple[int, Ticket | None]] = deque()
        self._reports: Reports = []
        self._deadline_s = 0.0

    def refresh(self, model: nn.Module, batch: Batch | None, state: Saved | None = None) -> bool:
        """Send the weights as they are now, if there is room; a saved state is ignored."""
        if self._inline is not None:
            return self._inline.refresh(model, batch, state)
        return state is None and not self._send(None, (model, batch))

    def submit(self, ticket: Ticket, batch: Batch, training_BB: Tensor) -> None:
        """Send an evaluation; without room it is dropped, which `poll` reports."""
        if self._inline is not None:
            self._inline.submit(ticket, batch, training_BB)
        elif reason := self._send(ticket, (batch, random_states(), training_BB)):
            self._reports.append(Answer(ticket, None, reason))

    def poll(self) -> Reports:
        """Return answers and events since the last call; a failed process is given up here."""
        if self._child is not None and (fault := self._receive(self._child)):
            self._give_up(fault)
        reports, self._reports = self._reports, []
        return reports + (self._inline.poll() if self._inline else [])

    def close(self) -> Reports:
        """End the process and free the memory; evaluations under way are lost."""
        self._end("the run ended before the controller process came to it")
        return self.poll()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing while the process has the reference: a resumed run makes a new one."""
        return self._inline.state_dict() if self._inline else {}

    def _send(self, ticket: Ticket | None, content: Any) -> str:
        """Send a task to the process; return why it will not be done, or an empty string."""
        used = {file for file, _ in self._unanswered}
        files = self._files[:1] if ticket is None else self._files[1:-1]
        file = next((file for file in files if file not in used), None)
        if file is None:
            return "the controller is behind: its queue is full"
        try:
            pack(content, file)
            if not self._unanswered:
                start_s = 0.0 if self._child else START_S
                self._deadline_s = time.monotonic() + start_s + self._timeout_s
            if self._child is None:
                self._child = self._start()
        except Exception as error:
            what = "the model" if ticket is None else "an evaluation"
            reason = f"{what} cannot be sent there ({brief(error)})"
            self._give_up(reason)
            return reason
        self._unanswered.append((file, ticket))
        with contextlib.suppress(OSError):  # it died, which `poll` will find
            self._pipe.send(self._unanswered[-1])
        return ""

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a fresh interpreter that runs `main`.

        `multiprocessing` would run the user's script again. In its own process group it gets no
        Ctrl-C, and the system wakes it up if the training ends while it is stopped.
        """
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            program = (
                f"import os, sys; os.setpgid(0, 0); sys.path[:] = {[*map(os.fspath, sys.path)]!r}; "
                f"from {__name__} import main; main({theirs.fileno()}, {os.getpid()})"
            )
            child = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno(), *self._files],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._files[-1],
            )
        self._held.callback(_kill, child, self._pipe, os.getpid())
        numbers = torch.get_default_dtype(), torch.get_float32_matmul_precision()
        waits = self._load_limit, self._timeout_s / PATIENT_SHARE
        self._pipe.send((self._settings, waits, *numbers))
        return child

    def _receive(self, child: subprocess.Popen[bytes]) -> str:
        """Take the answers that have arrived; return why no more will, or an empty string."""
        try:
            while self._pipe.poll(0):
                outcome, self.cpu_s = self._pipe.recv()
                if isinstance(outcome, str):
                    return f"it refuses: {outcome}"
                self._reports += outcome
                self._unanswered.popleft()
                self._deadline_s = time.monotonic() + self._timeout_s
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
            said = os.pread(self._files[-1], 2**20, 0).decode(errors="replace").strip()
            last = said.rpartition("\n")[2][:300]
            return f"it died (status {child.returncode}{last and f': {last}'})"
        is_late = self._unanswered and time.monotonic() > self._deadline_s
        return f"it gave no answer for over {self._timeout_s:g} s" if is_late else ""

    def _give_up(self, reason: str) -> None:
        """Evaluate in this process, from the next refresh on."""
        self._inline = InlineController(*self._settings)
        self._end("the controller process was given up")
        what = "evaluating in a process of its own"
        reason = f"{reason.rstrip('.')}; evaluations are made in the training process from here on"
        self._reports.append(Declined(step=0, what=what, reason=reason))

    def _end(self, reason: str) -> None:
        """End the process and give back the memory; evaluations under way are lost."""
        self._reports += [Answer(ticket, None, reason) for _, ticket in self._unanswered if ticket]
        self._unanswered.clear()
        self._child = None
        self._release()


def _kill(child: subprocess.Popen[bytes], pipe: Any, owner: int) -> None:
    """Kill the process, which has nothing that could be lost."""
    if os.getpid() != owner:
        return  # a forked data worker inherits this object, but not the child
    pipe.close()
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_S)


# --- in the process ------------------------------------------------------------------------------


def main(descriptor: int, parent: int) -> None:
    """Answer the messages of a pipe until its other end is closed, or the parent is gone."""
    # The pipe may stay open after the parent's end: forked data workers hold it.
    threading.Thread(target=_end_behind, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(5)  # at 10 the first build took 19 s on a busy machine
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # it preempts no thread
    pipe = Connection(descriptor)
    try:
        settings, (load_limit, patience_s), dtype, precision = pipe.recv()
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        controller = InlineController(*settings)
        while True:
            file, ticket = pipe.recv()
            ends = time.monotonic() + patience_s
            while load_limit < 1 and time.monotonic() < ends:
                if psutil.cpu_percent(LOOK_EVERY_S) <= 100 * load_limit:
                    break
            pipe.send((_answer(controller, file, ticket), time.process_time()))
    except (EOFError, OSError):
        os._exit(0)  # at once: an interpreter with torch in it takes its time to shut down


def _end_behind(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_EVERY_S)
    os._exit(0)


def _answer(controller: InlineController, file: int, ticket: Ticket | None) -> Reports | str:
    """Take a snapshot or make an evaluation; return the reports, or why there are none."""
    try:
        content = unpack(file)
        if ticket is None:
            controller.refresh(*content)
        else:
            batch, states, training_BB = content
            set_random_states(states)  # as they were when the evaluation was asked for
            controller.submit(ticket, batch, training_BB)
    except (Exception, SystemExit) as error:  # a module imported for its classes may exit
        return brief(error)
    reports = controller.poll()
    return next((r.reason for r in reports if isinstance(r, Answer) and r.reason), reports)


def pack(content: Any, file: int) -> None:
    """Write an object to a file, replacing its content."""
    with os.fdopen(file, "wb", closefd=False) as stream:
        stream.seek(0)
        torch.save(content, stream, _SENDING, pickle.HIGHEST_PROTOCOL)
        stream.truncate()


def unpack(file: int) -> Any:
    """Return the object in a file, with its tensors on the CPU."""
    with os.fdopen(file, "rb", closefd=False) as stream:
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=False)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends modules without their watching hooks, which a reference does not need."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, nn.Module):
            return super().reducer_override(thing)
        try:
            reduced: Any = thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except RuntimeError:  # parametrized modules refuse to be pickled
            reduced = copyreg.__newobj__, (type(thing),), vars(thing)  # type: ignore[attr-defined]
        make, arguments, *rest = reduced
        if rest and isinstance(rest[0], dict):
            rest[0] = without_watchers(rest[0])
        return (make, arguments, *rest)


# Stands for the pickle module in `torch.save`.
_SENDING = SimpleNamespace(__name__=__name__, Pickler=_Pickler)


def choose(kind: str, device: str, model: nn.Module, loader: Any = None) -> tuple[str, str, str]:
    """Return the kind of controller, the device of the reference such as 'cuda:1', and why.

    `kind` and `device` are the settings, which may be 'auto'. Threads of the training and workers
    of its loader need cores too.
    """
    accelerator = next((str(p.device) for p in model.parameters() if p.device.type == "cuda"), "")
    workers, ranks = getattr(loader, "num_workers", 0), os.environ.get("LOCAL_WORLD_SIZE", "1")
    busy = torch.get_num_threads() + (workers if isinstance(workers, int) else 0)
    spare = usable_cores() - busy * (int(ranks) if ranks.isdigit() else 1)
    place = f"training is on {accelerator or 'the CPU'}"
    reason = f"{place}, and {max(spare, 0):g} of {usable_cores():g} cores are spare"
    if accelerator and (device == "cuda" or (device == "auto" and kind != "process" and spare < 1)):
        return "inline", accelerator, f"{reason}; the reference runs on the device of the training"
    if not hasattr(os, "memfd_create"):
        return "inline", "cpu", "the controller process needs Linux"
    return {"auto": "process" if accelerator else "inline"}.get(kind, kind), "cpu", reason


def usable_cores() -> float:
    """Return how many cores this process may use, by affinity and the quota of its container."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    try:
        quota = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return min(cores, int(quota[0]) / int(quota[1]))
    except (OSError, ValueError):
        return cores
