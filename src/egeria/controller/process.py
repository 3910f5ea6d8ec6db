"""The controller in a separate process: training hands over, polls, and never waits."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from egeria.config import ControllerConfig
from egeria.controller.inline import EvaluationPlan, InlineController
from egeria.controller.launch import (
    Child,
    Freed,
    FromController,
    Heartbeat,
    Ready,
    Reports,
    TakeEvaluation,
    TakeModel,
    TakeSnapshot,
    ToController,
    Unusable,
    Watchdog,
)
from egeria.controller.protocol import ControllerStatus, Report, Request, Ticket, brief
from egeria.controller.shared_memory import SharedQueue, Slot
from egeria.errors import ControllerError
from egeria.events import ControllerRestarted, Declined, FaultCaught, ReadingDropped, ReferenceRefreshed, RungTaken
from egeria.layers.batch import Batch
from egeria.layers.undisturbed import RandomState
from egeria.policy import Reading

LARGEST_SKELETON_BYTES = 64 * 2**20


class ProcessController:
    """Gives the evaluations to a child process, and replaces it when it dies or hangs.

    The batch and the training output of an evaluation are known at the same moment, so that the paper's IQ and TOQ
    are one queue, and the reference output needs no queue (ROQ) to wait for its counterpart. Weights and a
    calibration batch go through a queue of their own. The process works through all in the order they
    were queued, so an evaluation meets the snapshot that it was asked on.

    Where a process cannot be had at all, because it cannot be started or the model cannot be sent to it,
    evaluations are made in the training process instead, for good.

    Args:
        plan: how to evaluate.
        config: how long the process may be silent, how often it is replaced, and what it may take.
    """

    def __init__(self, plan: EvaluationPlan, config: ControllerConfig) -> None:
        self._plan = plan
        self._config = config
        self._queues = {
            "evaluation": SharedQueue(config.queue_length),
            "model": SharedQueue(1),
            "snapshot": SharedQueue(2),  # one to work from, one on its way
        }
        self._child: Child | None = None
        self._inline: InlineController | None = None
        self._newest: tuple[int, weakref.ref[nn.Module], Batch | None] | None = None
        self._slots: dict[str, Slot] = {}
        self._shapes: list[object] = []
        self._pending: dict[int, Ticket] = {}
        self._reports: list[Report] = []
        self._precision = plan.precision
        self._watchdog = Watchdog(config)
        self._past_cpu_s = self._child_cpu_s = 0.0
        self._snapshot_evaluation = 0
        self._num_refreshing = 0
        self._is_deaf = False
        self._has_ended = False

    @property
    def pid(self) -> int | None:
        """The number of the process, None while there is none."""
        return self._child.pid if self._child else None

    def refresh(
        self, evaluation: int, model: nn.Module, batch: Batch | None, state: Mapping[str, Any] | None = None
    ) -> bool:
        """Queue the weights as they are now; False while those of two earlier refreshes wait there.

        Of a saved state only the number format is taken: the reference is still to be refreshed.
        """
        self._newest = evaluation, weakref.ref(model), batch  # a model gathered from shards is not to be kept
        if self._inline is not None:
            return self._inline.refresh(evaluation, model, batch, state)
        if state is not None:
            self._precision = state.get("precision", self._precision)
        if state is not None or self._has_ended:
            return False
        try:
            if self._child is None:
                self._start()
            return self._queue_snapshot(evaluation, model, batch)
        except ControllerError as error:
            self._evaluate_inline(error)
            return True

    def submit(self, request: Request) -> None:
        """Queue one evaluation; without room it is lost and reported so."""
        if self._inline is not None:
            self._inline.submit(request)
            return
        ticket, activation = request.ticket, request.activation
        if self._has_ended:
            self._reports.append(ticket.lost("the controller has ended"))
            return
        try:
            training, num_rows = self._plan.reduce(activation), activation.shape[0]
            slot = self._queues["evaluation"].put((request.batch, RandomState.current(), num_rows, training))
        except Exception as error:
            self._reports.append(ticket.failed(error))
            return
        if slot is None:
            self._reports.append(ticket.lost("the controller is behind: its queue is full"))
            return
        self._send(TakeEvaluation(ticket, slot))
        self._pending[ticket.evaluation] = ticket

    def poll(self) -> ControllerStatus:
        """Return what happened since the last call; a process that died or hangs is replaced here.

        The first poll starts the process, so that it imports what it needs while the model bootstraps. One that dies
        while idle is replaced before it is needed.
        """
        try:
            if self._child is not None:
                self._receive(self._child)
            elif self._inline is None and not self._has_ended:
                self._start()
        except ControllerError as error:
            self._evaluate_inline(error)
        if self._inline is not None:
            self._reports += self._inline.poll().reports
        return self._status()

    def close(self) -> ControllerStatus:
        """End the process and give back the memory; evaluations under way are lost."""
        if self._inline is not None:
            self._reports += self._inline.close().reports
        self._release("the run ended before the controller came to it")
        self._has_ended = True
        return self._status()

    def state_dict(self) -> dict[str, Any]:
        """Return the number format; the reference itself starts again from the weights of the resumed model."""
        return {"precision": self._precision} if self._inline is None else self._inline.state_dict()

    def _status(self) -> ControllerStatus:
        reports, self._reports = self._reports, []
        return ControllerStatus(
            reports=reports,
            is_asynchronous=self._child is not None,
            has_ended=self._has_ended,
            cpu_s=self._past_cpu_s + self._child_cpu_s,
        )

    def _evaluate_inline(self, error: ControllerError) -> None:
        self._release("its controller process is given up")
        reason = f"{error}. Evaluations are made in the training process instead"
        self._reports.append(Declined(step=0, what="the controller process", reason=reason))
        self._inline = InlineController(self._plan)
        if self._newest is None:
            return
        evaluation, reference, batch = self._newest
        model = reference()
        if model is not None:
            self._inline.refresh(evaluation, model, batch)
        else:
            text = "the weights are gathered anew"
            self._reports.append(FaultCaught(step=0, where="refreshing the reference", error=text, count=1))

    # --- to the process ------------------------------------------------------------------------

    def _start(self) -> None:
        descriptors = {name: [entry.descriptor for entry in queue.segments] for name, queue in self._queues.items()}
        settings = {
            "queues": descriptors,
            "load_limit": self._config.load_limit,
            "patience_s": self._config.patience_s,
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "matmul_precision": torch.get_float32_matmul_precision(),
        }
        try:
            self._child = Child(settings, [entry for entries in descriptors.values() for entry in entries])
        except Exception as error:
            raise ControllerError(f"the controller process cannot be started ({brief(error)})") from error
        self._watchdog.note_start()

    def _queue_snapshot(self, evaluation: int, model: nn.Module, batch: Batch | None) -> bool:
        snapshots = self._queues["snapshot"]
        tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
        try:
            shapes: list[object] = [(tensor.shape, tensor.dtype) for tensor in tensors]
            is_new = shapes != self._shapes
            if not snapshots.free or (is_new and len(snapshots.free) < len(snapshots.segments)):
                return False
            if is_new:
                self._slots["model"] = self._pack_model(model, tensors)
            slot = snapshots.put((tensors, batch))
        except Exception as error:
            raise ControllerError(f"the model cannot be sent to the controller process ({brief(error)})") from error
        assert slot is not None
        self._shapes, self._snapshot_evaluation, self._slots["snapshot"] = shapes, evaluation, slot
        self._send_snapshot(with_model=is_new)
        return True

    def _pack_model(self, model: nn.Module, weights: list[Tensor]) -> Slot:
        """Pack how the model is built; its weights follow with the snapshot."""
        models = self._queues["model"]
        models.empty()
        slot = models.put((self._plan, model), without_values=weights)
        assert slot is not None
        weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights)
        if slot.size_bytes > max(LARGEST_SKELETON_BYTES, weights_bytes):
            raise ValueError(f"its classes and attributes carry {slot.size_bytes / 2**20:.0f} MiB along")
        return slot

    def _send_snapshot(self, *, with_model: bool) -> None:
        if with_model:
            self._send(TakeModel(self._slots["model"], self._precision))
        self._num_refreshing += 1
        self._send(TakeSnapshot(self._snapshot_evaluation, self._slots["snapshot"]))

    def _send(self, message: ToController) -> None:
        """Send; where that fails `poll` replaces the process."""
        if self._child is None:
            return
        if not self._is_busy:
            self._watchdog.note_work()  # there was nothing to do before
        try:
            self._child.send(message)
        except Exception:
            self._is_deaf = True

    # --- from the process ----------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return bool(self._pending or self._num_refreshing) or not self._watchdog.is_ready

    def _receive(self, child: Child) -> None:
        try:
            for message in child.receive():
                self._take_in_message(message)
        except (EOFError, OSError):
            self._replace("it died")
        else:
            if self._is_deaf:
                self._replace("it does not read its messages")
            elif self._is_busy and self._watchdog.is_lost:
                self._replace(f"it gave no sign of life for {self._config.timeout_s:g} s")

    def _take_in_message(self, message: FromController) -> None:
        if isinstance(message, Heartbeat):
            self._watchdog.note_heartbeat()
            return
        self._watchdog.note_work()
        if isinstance(message, Ready):
            self._watchdog.note_ready()
        elif isinstance(message, Freed):
            if message.queue != "model":  # kept for a process that replaces this one
                self._queues[message.queue].free.add(message.number)
        elif isinstance(message, Unusable):
            raise ControllerError(f"the model cannot be rebuilt in the controller process ({message.reason})")
        elif isinstance(message, Reports):
            self._child_cpu_s = message.cpu_s
            for report in message.reports:
                self._take_in_report(report)

    def _take_in_report(self, report: Report) -> None:
        if isinstance(report, Reading | ReadingDropped):
            if self._pending.pop(report.evaluation, None) is None:
                return
            self._watchdog.note_reading()
        elif isinstance(report, RungTaken) and report.before:
            # A process that replaces this one begins where it ended. The first choice it makes by itself.
            self._precision = report.after.removesuffix("-static")
        elif isinstance(report, ReferenceRefreshed | FaultCaught):
            self._num_refreshing = max(0, self._num_refreshing - 1)
        self._reports.append(report)

    # --- replacing it --------------------------------------------------------------------------

    def _replace(self, reason: str) -> None:
        """End the process and start another, which gets the model and the last snapshot again."""
        reason = f"{reason} ({self._end_child()})"
        if self._watchdog.never_came_up:
            raise ControllerError(f"the controller process does not come up: {reason}")
        self._drop_pending(f"the controller was replaced: {reason}")
        if not self._watchdog.allow_restart():
            self._has_ended = True
            text = f"it ended {self._watchdog.num_restarts} times, last because {reason}"
            self._reports.append(Declined(step=0, what="judging plasticity", reason=text))
            return
        self._start()
        self._reports.append(ControllerRestarted(step=0, count=self._watchdog.num_restarts, reason=reason))
        if "snapshot" in self._slots:
            self._send_snapshot(with_model=True)

    def _end_child(self) -> str:
        child, self._child = self._child, None
        self._num_refreshing, self._is_deaf = 0, False
        self._past_cpu_s, self._child_cpu_s = self._past_cpu_s + self._child_cpu_s, 0.0
        self._queues["evaluation"].empty()
        self._queues["snapshot"].empty(but=self._slots.get("snapshot"))  # for a process that replaces this one
        return child.end() if child is not None else ""

    def _drop_pending(self, reason: str) -> None:
        self._reports += [ticket.lost(reason) for ticket in self._pending.values()]
        self._pending.clear()

    def _release(self, reason: str) -> None:
        self._drop_pending(reason)
        self._end_child()
        for queue in self._queues.values():
            queue.close()
