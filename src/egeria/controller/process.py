"""The controller in a process of its own, and when it is chosen."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from egeria.controller.inline import (
    Answer,
    Controller,
    EvaluationPlan,
    InlineController,
    Report,
    State,
    Ticket,
)
from egeria.controller.worker import Message, handle, pack
from egeria.errors import brief
from egeria.events import Declined
from egeria.model.passes import Batch
from egeria.random_state import RandomState

START_S, END_S = 60.0, 5.0  # the start takes so long besides: torch is imported, on a busy machine
NUM_SNAPSHOTS, QUEUE_LENGTH = 2, 4  # one snapshot is worked from, and one is on its way
PATIENT_SHARE = 12  # of the timeout that an evaluation waits for processors that are busy

# Spinning threads of two processes on the same cores slow both down 10 to 100 times; and the
# accelerator, with the memory a context takes on it, belongs to the training alone.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class ProcessController(Controller):
    """Makes the evaluations in a child process: training sends and polls, and never waits.

    The batch and the training output of an evaluation are known at the same moment, so that the
    paper's IQ and TOQ are one queue, and the reference output needs none (ROQ) to wait for its
    counterpart. The process takes snapshots and evaluations in the order in which they were asked.

    It is started with the first snapshot. Where it cannot be started, dies, hangs or refuses, what
    it has not answered is evaluated in the training process, and so is everything from there on,
    with the same readings.

    Args:
        plan: how to evaluate.
        timeout_s: seconds without an answer after which the process is given up.
        load_limit: load of the processors above which it waits, a twelfth of the timeout at most;
            1 never waits.
    """

    def __init__(self, plan: EvaluationPlan, timeout_s: float, load_limit: float = 1.0) -> None:
        self._plan, self._timeout_s, self._load_limit = plan, timeout_s, load_limit
        # Of snapshots, of evaluations, and of what the process prints. They have no names.
        self._files = [os.memfd_create("egeria") for _ in range(NUM_SNAPSHOTS + QUEUE_LENGTH + 1)]
        self._held = contextlib.ExitStack()
        for file in self._files:
            self._held.callback(os.close, file)
        self._release = weakref.finalize(self, self._held.close)
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None
        self._inline: InlineController | None = None
        self._unanswered: deque[Message] = deque()
        self._snapshot: Message | None = None  # the one that the process works from
        self._reports: list[Report] = []
        self._deadline_s = 0.0

    @property
    def is_apart(self) -> bool:  # type: ignore[override]
        """Whether evaluations are made in another process."""
        return self._inline is None

    def refresh(self, model: nn.Module, batch: Batch | None, state: State | None = None) -> bool:
        """Send the weights as they are now, if there is room; of a saved state nothing is taken."""
        if self._inline is None and state is None:
            try:
                return self._send((model, batch), range(NUM_SNAPSHOTS))
            except Exception as error:
                self._decline(f"the model cannot be sent there ({brief(error)})")
        return bool(self._inline and self._inline.refresh(model, batch, state))

    def submit(self, ticket: Ticket, batch: Batch, activation: Tensor) -> None:
        """Send one evaluation; without room it is dropped, which `poll` reports."""
        if self._inline is None:
            try:
                content = batch, RandomState.current(), self._plan.reduce(activation)
                files = range(NUM_SNAPSHOTS, NUM_SNAPSHOTS + QUEUE_LENGTH)
                if not self._send(content, files, ticket):
                    full = "the controller is behind: its queue is full"
                    self._reports.append(Answer(ticket, None, full))
            except Exception as error:
                self._decline(f"an evaluation cannot be sent there ({brief(error)})")
        if self._inline is not None:
            self._inline.submit(ticket, batch, activation)

    def poll(self) -> list[Report]:
        """Return what happened since the last call; a process that fails is given up here."""
        if self._child is not None and (fault := self._receive(self._child)):
            self._decline(fault)
        reports, self._reports = self._reports, []
        return reports + (self._inline.poll() if self._inline else [])

    def close(self) -> list[Report]:
        """End the process and give back the memory; evaluations under way are lost."""
        reason = "the run ended before the controller came to it"
        tickets = [message.ticket for message in self._unanswered if message.ticket]
        self._reports += [Answer(ticket, None, reason) for ticket in tickets]
        self._go_on(self._inline)
        return self.poll()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing while the process has the reference: a resumed run begins with another."""
        return self._inline.state_dict() if self._inline else {}

    def _send(self, content: Any, files: range, ticket: Ticket | None = None) -> bool:
        """Copy something into one of the files, and tell the process; False if all are in use."""
        used = {message.file for message in (*self._unanswered, self._snapshot) if message}
        file = next((file for file in files if file not in used), None)
        if file is None:
            return False
        pack(content, self._files[file])
        if not self._unanswered:
            start_s = 0.0 if self._child else START_S
            self._deadline_s = time.monotonic() + start_s + self._timeout_s
        if self._child is None:
            self._start()
        self._unanswered.append(Message(file, ticket))
        with contextlib.suppress(OSError):  # it died, which `poll` finds
            self._pipe.send(self._unanswered[-1])
        return True

    def _start(self) -> None:
        """Start a fresh interpreter that runs `egeria.controller.worker.main`.

        By its own command line and not by `multiprocessing`, which would run the user's script
        again: a script without `__main__` guard and a notebook need nothing. It has a process group
        of its own, so that Ctrl-C is for the training alone, and that the system wakes it up if the
        training ends while it is stopped.
        """
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            program = (
                f"import os, sys; os.setpgid(0, 0); sys.path[:] = {[*map(os.fspath, sys.path)]!r}; "
                f"from egeria.controller.worker import main; main({theirs.fileno()}, {os.getpid()})"
            )
            self._child = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno(), *self._files],
                env={**os.environ, **ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._files[-1],
            )
        self._held.callback(_end, self._child, self._pipe, os.getpid())
        numbers = torch.get_default_dtype(), torch.get_float32_matmul_precision()
        waits = self._load_limit, self._timeout_s / PATIENT_SHARE
        self._pipe.send((self._plan, self._files, waits, *numbers))

    def _receive(self, child: subprocess.Popen[bytes]) -> str:
        """Take the answers that have come; return why no more will come, "" where they will."""
        try:
            while self._pipe.poll(0):
                outcome, self.cpu_s = self._pipe.recv()
                if isinstance(outcome, str):
                    return f"it refuses: {outcome}"
                self._reports += outcome
                message = self._unanswered.popleft()
                self._snapshot = self._snapshot if message.ticket else message
                self._deadline_s = time.monotonic() + self._timeout_s
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
            lines = os.pread(self._files[-1], 2**20, 0).decode(errors="replace").split("\n")
            last = next((f": {line[:300]}" for line in reversed(lines) if line.strip()), "")
            return f"it died (status {child.returncode}{last})"
        is_late = self._unanswered and time.monotonic() > self._deadline_s
        return f"it gave no answer for over {self._timeout_s:g} s" if is_late else ""

    def _decline(self, reason: str) -> None:
        """Go on in this process, with what the other one has not answered."""
        what = "evaluating in a process of its own"
        reason = f"{reason.rstrip('.')}; evaluations are made in the training process from here on"
        self._reports.append(Declined(step=0, what=what, reason=reason))
        inline, before = InlineController(self._plan), RandomState.current()
        if self._child is not None:  # it must not read a file at the same time
            _end(self._child, self._pipe, os.getpid())
        try:
            if self._snapshot is not None:
                handle(inline, self._files, self._snapshot)  # reported when the process took it
            for message in self._unanswered:
                self._reports += handle(inline, self._files, message)
        finally:
            before.set()
        self._go_on(inline)

    def _go_on(self, inline: InlineController | None) -> None:
        """Go on in this process, or not at all."""
        self._inline, self._child = inline, None
        self._release()
        self._unanswered.clear()


def _end(child: subprocess.Popen[bytes], pipe: Any, owner: int) -> None:
    """Kill the process, which holds nothing that could be lost."""
    if os.getpid() != owner:
        return  # a forked data worker has inherited this object, not the child
    pipe.close()
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_S)


class ControllerChoice(NamedTuple):
    """Which controller it is, 'process' or 'inline'; where the reference runs; and why."""

    kind: str
    device: str  # 'cpu', or such as 'cuda:1'
    reason: str


def choose(kind: str, device: str, model: nn.Module, loader: Any = None) -> ControllerChoice:
    """Choose a kind of controller.

    Args:
        kind: 'auto', 'process' or 'inline'; what is not 'auto' is taken.
        device: 'auto', 'cpu' or 'cuda': where the reference runs.
        model: the model in training.
        loader: its loader, whose workers need cores too.
    """
    devices = (parameter.device for parameter in model.parameters())
    accelerator = next((str(found) for found in devices if found.type == "cuda"), "")
    spare = spare_cores(loader)
    found = f"{usable_cores():g} cores can be used and {max(spare, 0):g} of them are spare"
    if device == "cuda" and not accelerator:
        found += "; reference.device is 'cuda', but the model is not on one"
    is_beside = device == "cuda" or (device == "auto" and kind != "process" and spare < 1)
    if accelerator and is_beside:
        reason = f"the reference runs beside the training on its device; {found}"
        return ControllerChoice("inline", accelerator, reason)
    if not hasattr(os, "memfd_create"):
        return ControllerChoice("inline", "cpu", "the controller process needs Linux")
    if kind != "auto":
        return ControllerChoice(kind, "cpu", f"set in controller.kind; {found}")
    if accelerator:
        return ControllerChoice("process", "cpu", f"training is on an accelerator; {found}")
    return ControllerChoice("inline", "cpu", f"training is on the CPU; {found}")


def spare_cores(loader: Any = None) -> float:
    """Return how many cores neither training threads nor data workers of this job need."""
    workers = getattr(loader, "num_workers", 0)
    each = torch.get_num_threads() + (workers if isinstance(workers, int) else 0)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return usable_cores() - each * (int(ranks) if ranks.isdigit() else 1)


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Return how many cores this process may use, by its affinity and its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    try:
        granted, _, period = quota.read_text(encoding="ascii").partition(" ")
        return min(cores, int(granted) / int(period))
    except (OSError, ValueError):
        return cores
