"""The controller in a process of its own: training hands over, polls, and never waits; and when it
is chosen.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from egeria.config import ControllerConfig
from egeria.controller.inline import EvaluationPlan, InlineController
from egeria.controller.protocol import (
    Controller,
    ControllerStatus,
    EvaluationResult,
    Report,
    Request,
)
from egeria.controller.worker import Message, Worker, pack
from egeria.errors import brief
from egeria.events import ControllerChosen, Declined, ReferenceRefreshed
from egeria.model.batch import Batch
from egeria.random_state import RandomState

START_S, END_S = 60.0, 5.0
"""The start may take so long besides: torch is imported, on a machine that may be busy."""
NUM_SNAPSHOTS, LONGEST_QUEUE = 2, 64
"""The process works from one, and one is on its way; a pipe holds that many messages unread."""
SPARE_CORES = 2
REPAID_S = 600.0
"""Seconds of training left from which the process is started where that is not asked for: the start
takes 2 to 4 s of CPU time, and may take 0.5 % of what is left."""

# Spinning threads of two processes on the same cores slow both down 10 to 100 times; and the
# accelerator, with the memory a context takes on it, belongs to the training alone.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class ProcessController(Controller):
    """Gives the evaluations to a child process.

    The batch and the training output of an evaluation are known at the same moment, so that the
    paper's IQ and TOQ are one queue, and the reference output needs no queue (ROQ) to wait for its
    counterpart. The process works through snapshots and evaluations in their order, so that an
    evaluation meets the snapshot that it was asked on.

    The process is started with the first snapshot. Where it cannot be had, dies, hangs or refuses,
    what it has not answered is evaluated in the training process, and so is everything from there
    on: with the same readings. So it is where the rest of the run is too short to repay its start.

    Args:
        plan: how to evaluate.
        config: what it may cost.
        seconds_left: returns how long the training still takes, None where unknown; without it any
            run is long enough.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        config: ControllerConfig,
        seconds_left: Callable[[], float | None] | None = None,
    ) -> None:
        self._plan, self._config, self._seconds_left = plan, config, seconds_left
        num_files = NUM_SNAPSHOTS + min(config.queue_length, LONGEST_QUEUE)
        self._queue = range(NUM_SNAPSHOTS, num_files)
        self._files = [_unnamed_file() for _ in range(num_files + 1)]
        """Of snapshots, of evaluations in the queue, and what the process prints."""
        self._held = contextlib.ExitStack()
        for file in self._files:
            self._held.callback(os.close, file)
        self._release = weakref.finalize(self, self._held.close)
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None
        self._inline: InlineController | None = None
        self._unanswered: deque[Message] = deque()
        self._snapshot: Message | None = None
        """The one that the process works from."""
        self._reports: list[Report] = []
        self._start_s, self._waits_since_s, self._cpu_s = START_S, 0.0, 0.0

    def refresh(
        self,
        evaluation: int,
        model: nn.Module,
        batch: Batch | None,
        state: Mapping[str, Any] | None = None,
    ) -> bool:
        """Send the weights as they are now, if there is room; of a saved state nothing is taken."""
        is_sent = False
        if self._inline is None and (reason := self._reason_to_stay(state)):
            self._reports.append(ControllerChosen(step=0, controller="inline", reason=reason))
            self._go_on(InlineController(self._plan))
        elif self._inline is None and state is None:
            try:
                is_sent = self._send((model, batch), range(NUM_SNAPSHOTS), evaluation)
            except Exception as error:
                self._decline(f"the model cannot be sent there ({brief(error)})")
        return self._inline.refresh(evaluation, model, batch, state) if self._inline else is_sent

    def submit(self, request: Request) -> None:
        """Send one evaluation; without room it is dropped and reported so."""
        ticket = request.ticket
        if self._inline is None:
            try:
                training = self._plan.reduce(request.activation)
                content = request.batch, RandomState.current(), training
                if not self._send(content, self._queue, ticket.evaluation, ticket):
                    self._reports.append(ticket.lost("the controller is behind: its queue is full"))
            except Exception as error:
                self._decline(f"an evaluation cannot be sent there ({brief(error)})")
        if self._inline is not None:
            self._inline.submit(request)

    def poll(self) -> ControllerStatus:
        """Return what happened since the last call; a process that fails is given up here."""
        if self._child is not None and (fault := self._receive(self._child)):
            self._decline(fault)
        reports, self._reports = self._reports, []
        return ControllerStatus(
            reports=reports + (self._inline.poll().reports if self._inline else []),
            is_asynchronous=self._child is not None,
            cpu_s=self._cpu_s,
        )

    def close(self) -> ControllerStatus:
        """End the process and give back the memory; evaluations under way are lost."""
        tickets = [message.ticket for message in self._unanswered if message.ticket]
        reason = "the run ended before the controller came to it"
        self._reports += [ticket.lost(reason) for ticket in tickets]
        self._go_on(self._inline)
        return self.poll()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing while the process has the reference: a resumed run begins with another."""
        return self._inline.state_dict() if self._inline else {}

    def _reason_to_stay(self, state: Mapping[str, Any] | None) -> str:
        """Return why no process is started, where it was not asked for."""
        if self._seconds_left is None or self._child is not None:
            return ""
        if state is not None:
            saved = "the run was saved with its evaluations in the training process"
            return saved if "reference" in state else ""
        left_s = self._seconds_left()
        if left_s is None or left_s >= REPAID_S:
            return ""
        return f"to start a process takes seconds of CPU time, and about {left_s:.0f} s are left"

    def _send(self, content: Any, files: range, *about: Any) -> bool:
        """Copy something into one of the files, and tell the process; False if all are in use."""
        used = {message.file for message in (*self._unanswered, self._snapshot) if message}
        file = next((file for file in files if file not in used), None)
        if file is None:
            return False
        pack(content, self._files[file])
        if self._child is None:
            self._start()
        if not self._unanswered:
            self._waits_since_s = time.monotonic()
        self._unanswered.append(Message(file, *about))
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
        self._pipe.send((self._plan, self._files, self._config, *numbers))

    def _receive(self, child: subprocess.Popen[bytes]) -> str:
        """Take the answers that have come; return why no more will come, "" where they will."""
        try:
            while self._pipe.poll(0):
                outcome, cpu_s = self._pipe.recv()
                if isinstance(outcome, str):
                    return f"it refuses: {outcome}"
                self._take_in(outcome, cpu_s)
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_S)
            lines = os.pread(self._files[-1], 2**20, 0).decode(errors="replace").split("\n")
            last = next((f": {line[:300]}" for line in reversed(lines) if line.strip()), "")
            return f"it died (status {child.returncode}{last})"
        longest_s = self._start_s + self._config.timeout_s + self._config.patience_s
        is_late = self._unanswered and time.monotonic() - self._waits_since_s > longest_s
        return f"it gave no answer for {longest_s:g} s" if is_late else ""

    def _take_in(self, reports: list[Report], cpu_s: float) -> None:
        """Take the answer to the message that was sent first."""
        message = self._unanswered.popleft()
        if message.ticket is None:
            self._snapshot = message
        self._waits_since_s, self._start_s = time.monotonic(), 0.0
        spent_s, self._cpu_s = cpu_s - self._cpu_s, cpu_s
        self._reports += [
            replace(report, controller_cpu_s=spent_s)
            if isinstance(report, (EvaluationResult, ReferenceRefreshed))
            else report
            for report in reports
        ]

    def _decline(self, reason: str) -> None:
        """Go on in this process, with what the other one has not answered."""
        what = "evaluating in a process of its own"
        reason = f"{reason.rstrip('.')}; evaluations are made in the training process from here on"
        self._reports.append(Declined(step=0, what=what, reason=reason))
        worker, before = Worker(self._plan, self._files), RandomState.current()
        if self._child is not None:  # it must not read a file at the same time
            _end(self._child, self._pipe, os.getpid())
        try:
            if self._snapshot is not None:
                worker.handle(self._snapshot)  # reported when the process took it
            for message in self._unanswered:
                self._reports += worker.handle(message)
        finally:
            before.set()
        self._go_on(worker.controller)

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


def _unnamed_file() -> int:
    """Return the descriptor of a file in memory, or elsewhere of one without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("egeria")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerChoice:
    """A kind of controller ('process' or 'inline'), where its reference runs ('cpu', or such as
    'cuda:1'), and why.
    """

    kind: str
    device: str
    reason: str
    must_repay: bool = False
    """Whether a process is started only where the rest of the run is long enough to repay that."""


def choose(kind: str, device: str, model: nn.Module, loader: Any = None) -> ControllerChoice:
    """Choose a kind of controller.

    Args:
        kind: 'auto', 'process' or 'inline'; what is not 'auto' is taken.
        device: 'auto', 'cpu' or 'cuda': where the reference runs.
        model: the model in training.
        loader: its loader, whose workers need cores too.
    """
    must_repay = False
    devices = (parameter.device for parameter in model.parameters())
    accelerator = next((str(found) for found in devices if found.type == "cuda"), "")
    cores, spare = usable_cores(), spare_cores(loader)
    found = f"{cores:g} cores can be used and {max(spare, 0):g} of them are spare"
    if device == "cuda" and not accelerator:
        found += "; reference.device is 'cuda', but the model is not on one"
    is_beside = device == "cuda" or (device == "auto" and kind != "process" and spare < 1)
    device = accelerator if accelerator and is_beside else "cpu"
    if device != "cpu":
        kind, reason = "inline", f"the reference runs beside the training on its device; {found}"
    elif os.name != "posix":
        kind, reason = "inline", "the controller process needs a POSIX system"
    elif kind != "auto":
        reason = f"set in controller.kind; {found}"
    elif accelerator:
        kind, reason = "process", f"training is on an accelerator; {found}"
    else:
        kind = "process" if spare >= SPARE_CORES else "inline"
        reason, must_repay = f"training is on the CPU, {found}", kind == "process"
    return ControllerChoice(kind=kind, device=device, reason=reason, must_repay=must_repay)


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
