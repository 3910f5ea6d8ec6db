"""The controller in a separate process: training hands over, polls, and never waits; and when it is
chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from egeria.config import ControllerConfig
from egeria.controller.child import Child, Freed, TakeEvaluation, TakeSnapshot, Unusable
from egeria.controller.inline import EvaluationPlan, InlineController
from egeria.controller.protocol import ControllerStatus, Report, Request, Ticket
from egeria.controller.shared_memory import SharedQueue, pack
from egeria.errors import ControllerError, brief
from egeria.events import ControllerChosen, ControllerRestarted, Declined, ReadingDropped, RungTaken
from egeria.layers.batch import Batch
from egeria.policy import Reading
from egeria.random_state import RandomState

SPARE_CORES = 2
LARGEST_SKELETON_BYTES = 64 * 2**20
RESTARTS_WITHOUT_A_READING = 10
ATTEMPTS_TO_START = 3
REPAID_S = 600.0
"""Seconds of training left from which the process is started where that is not asked for: the start
takes 2 to 4 s of CPU time, and may take 0.5 % of what is left."""


class ProcessController:
    """Gives the evaluations to a child process, and replaces it when it dies or hangs.

    The batch and the training output of an evaluation are known at the same moment, so that the
    paper's IQ and TOQ are one queue, and the reference output needs no queue (ROQ) to wait for its
    counterpart. Weights and a calibration batch go through a queue of their own. The process works
    through all in the order they were queued, so an evaluation meets the snapshot that it was asked
    on.

    The process is started with the first snapshot. Where one cannot be had at all, because it
    cannot be started or the model cannot be sent to it, or where the rest of the run is too short
    to repay its start, evaluations are made in the training process instead, for good.

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
        # Of two snapshots the process works from one, and the other is on its way.
        lengths = {"model": 1, "evaluation": config.queue_length, "snapshot": 2}
        self._queues = {name: SharedQueue(length) for name, length in lengths.items()}
        self._model_bytes = 0
        self._child: Child | None = None
        self._inline: InlineController | None = None
        self._shapes: list[object] | None = None
        self._snapshot: TakeSnapshot | None = None
        """The last one, for a process that replaces this one."""
        self._precision = plan.precision
        self._pending: dict[int, Ticket] = {}
        self._reports: list[Report] = []
        self._num_restarts = self._num_without_reading = 0
        self._has_come_up = self._has_ended = self._lacks_reference = False
        self._past_cpu_s = 0.0

    def refresh(
        self,
        evaluation: int,
        model: nn.Module,
        batch: Batch | None,
        state: Mapping[str, Any] | None = None,
    ) -> bool:
        """Queue the weights as they are now, if there is room; of a saved state only the number
        format is taken.
        """
        if self._inline is not None:
            is_made, self._lacks_reference = (
                self._inline.refresh(evaluation, model, batch, state),
                False,
            )
            return is_made
        if state is not None and "reference" in state and self._seconds_left is not None:
            self._stay_inline("the run was saved with its evaluations in the training process")
            return self.refresh(evaluation, model, batch, state)
        if state is not None:
            self._precision = state.get("precision", self._precision)
        if state is not None or self._has_ended:
            return False
        left_s = None if self._child or self._seconds_left is None else self._seconds_left()
        if left_s is not None and left_s < REPAID_S:
            self._stay_inline(
                f"to start a process takes seconds of CPU time, and about {left_s:.0f} s are left"
            )
            return self.refresh(evaluation, model, batch)
        try:
            return self._queue_snapshot(self._child or self._start(), evaluation, model, batch)
        except ControllerError as error:
            self._evaluate_inline(error)
            return self.refresh(evaluation, model, batch)

    def submit(self, request: Request) -> None:
        """Queue one evaluation; without room it is lost and reported so."""
        if self._inline is not None:
            self._inline.submit(request)
            return
        ticket = request.ticket
        try:
            training = self._plan.reduce(request.activation)
            slot = self._queues["evaluation"].put((request.batch, RandomState.current(), training))
        except Exception as error:
            self._reports.append(ticket.failed(error))
            return
        if slot is None:
            self._reports.append(ticket.lost("the controller is behind: its queue is full"))
            return
        if self._child is not None:
            self._child.send(TakeEvaluation(ticket, slot))
        self._pending[ticket.evaluation] = ticket

    def poll(self) -> ControllerStatus:
        """Return what happened since the last call; a process that died or hangs
        is replaced here.
        """
        try:
            if self._child is not None:
                self._receive(self._child)
        except ControllerError as error:
            self._evaluate_inline(error)
        return self._status()

    def close(self) -> ControllerStatus:
        """End the process and give back the memory; evaluations under way are lost."""
        self._release("the run ended before the controller came to it")
        self._has_ended = True
        return self._status()

    def state_dict(self) -> dict[str, Any]:
        """Return the number format; the reference itself starts again from the weights of the
        resumed model.
        """
        return {"precision": self._precision} if self._inline is None else self._inline.state_dict()

    def _status(self) -> ControllerStatus:
        reports, self._reports = self._reports, []
        return ControllerStatus(
            reports=reports + (self._inline.poll().reports if self._inline else []),
            is_asynchronous=self._child is not None,
            has_ended=self._has_ended,
            lacks_reference=self._lacks_reference,
            cpu_s=self._past_cpu_s + (self._child.cpu_s if self._child else 0.0),
        )

    def _stay_inline(self, reason: str) -> None:
        self._release("it was not started")
        self._reports.append(ControllerChosen(step=0, controller="inline", reason=reason))
        self._inline = InlineController(self._plan)

    def _start(self) -> Child:
        settings = {
            "memory": {
                name: [each.descriptor for each in queue.segments]
                for name, queue in self._queues.items()
            },
            "load_limit": self._config.load_limit,
            "patience_s": self._config.patience_s,
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "matmul_precision": torch.get_float32_matmul_precision(),
        }
        try:
            self._child = Child(settings, self._config.timeout_s)
        except Exception as error:
            raise ControllerError(
                f"the controller process cannot be started ({brief(error)})"
            ) from error
        return self._child

    def _queue_snapshot(
        self, child: Child, evaluation: int, model: nn.Module, batch: Batch | None
    ) -> bool:
        queue = self._queues["snapshot"]
        tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
        shapes: list[object] = [(tensor.shape, tensor.dtype) for tensor in tensors]
        is_new = shapes != self._shapes
        if not queue.free or (is_new and len(queue.free) < len(queue.segments)):
            return False
        try:
            if is_new:  # how the model is built; its weights follow with the snapshot
                self._model_bytes = pack(
                    (self._plan, model), self._queues["model"].segments[0], without_values=tensors
                )
                if self._model_bytes > max(
                    LARGEST_SKELETON_BYTES, sum(tensor.nbytes for tensor in tensors)
                ):
                    raise ValueError(
                        f"its classes and attributes carry {self._model_bytes / 2**20:.0f} MiB "
                        "along"
                    )
            slot = queue.put((tensors, batch))
        except Exception as error:
            raise ControllerError(
                f"the model cannot be sent to the controller process ({brief(error)})"
            ) from error
        assert slot is not None
        self._shapes = shapes
        self._snapshot = TakeSnapshot(
            evaluation, slot, self._model_bytes if is_new else None, self._precision
        )
        child.send(self._snapshot)
        return True

    def _receive(self, child: Child) -> None:
        messages, fault = child.receive()
        self._has_come_up = self._has_come_up or child.is_ready
        for message in messages:
            if isinstance(message, Freed):
                self._queues[message.queue].free.add(message.number)
            elif isinstance(message, Unusable):
                raise ControllerError(
                    f"the model cannot be rebuilt in the controller process ({message.reason})"
                )
            else:
                for report in message.reports:
                    self._take_in(report)
        if fault:
            self._replace(fault)

    def _take_in(self, report: Report) -> None:
        if isinstance(report, Reading | ReadingDropped):
            if self._pending.pop(report.evaluation, None) is None:
                return
            self._num_without_reading = 0
        elif isinstance(report, RungTaken) and report.before:
            # A process that replaces this one begins where it ended. The first choice it makes by
            # itself.
            self._precision = report.after.removesuffix("-static")
        self._reports.append(report)

    def _replace(self, reason: str) -> None:
        """End the process and start another, which gets the model and the last snapshot again."""
        reason = f"{reason} ({self._end_child()})"
        if not self._has_come_up and self._num_without_reading == ATTEMPTS_TO_START:
            raise ControllerError(f"the controller process does not come up: {reason}")
        self._drop_pending(f"the controller was replaced: {reason}")
        self._num_restarts += 1
        self._num_without_reading += 1
        if (
            self._num_without_reading > RESTARTS_WITHOUT_A_READING
            or self._num_restarts > self._config.restarts
        ):
            self._has_ended = True
            text = f"it ended {self._num_restarts} times, last because {reason}"
            self._reports.append(Declined(step=0, what="judging plasticity", reason=text))
            return
        child = self._start()
        self._reports.append(ControllerRestarted(step=0, count=self._num_restarts, reason=reason))
        if self._snapshot is not None:
            child.send(
                replace(self._snapshot, model_bytes=self._model_bytes, precision=self._precision)
            )

    def _evaluate_inline(self, error: ControllerError) -> None:
        self._release("its controller process is given up")
        reason = f"{error}. Evaluations are made in the training process instead"
        self._reports.append(Declined(step=0, what="the controller process", reason=reason))
        self._inline, self._lacks_reference = InlineController(self._plan), True

    def _end_child(self) -> str:
        child, self._child = self._child, None
        self._queues["evaluation"].empty()
        self._queues["snapshot"].empty(but=self._snapshot.slot if self._snapshot else None)
        if child is None:
            return ""
        self._past_cpu_s += child.cpu_s
        return child.end()

    def _drop_pending(self, reason: str) -> None:
        self._reports += [ticket.lost(reason) for ticket in self._pending.values()]
        self._pending.clear()

    def _release(self, reason: str) -> None:
        self._drop_pending(reason)
        self._end_child()
        for queue in self._queues.values():
            queue.close()


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
        kind, reason = (
            "process" if spare >= SPARE_CORES else "inline",
            f"training is on the CPU, {found}",
        )
        must_repay = kind == "process"
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
