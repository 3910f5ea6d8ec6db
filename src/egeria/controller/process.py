"""The controller in a process of its own: training hands over, polls, and never waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from egeria.controller import messages
from egeria.controller.assessor import Plan
from egeria.controller.launch import Child
from egeria.controller.protocol import ControllerStatus, Report, Request, Ticket, brief
from egeria.controller.queues import Place, Producer
from egeria.controller.trust import Limits, Trust
from egeria.errors import ControllerError
from egeria.events import ControllerRestarted, Declined, FaultCaught, ReadingDropped, ReferenceRefreshed, RungTaken
from egeria.layers.batch import Batch
from egeria.layers.undisturbed import RandomState
from egeria.policy import Reading

LARGEST_SKELETON_BYTES = 64 * 2**20


class ProcessController:
    """Gives the evaluations to a child process, and replaces it when it dies or hangs.

    Three queues as in the paper: batches go through IQ, training outputs through TOQ, and inside the
    child reference outputs wait in ROQ for the training output of the same evaluation. Weights and a
    calibration batch go through a queue of their own. The process works through all in the order they
    were queued, so an evaluation meets the snapshot that it was asked on.

    `refresh` and `poll` raise `ControllerError` where a process cannot be had at all: it
    cannot be started, or the model cannot be sent to it.

    Args:
        plan: how to evaluate.
        limits: how far the process is trusted.
    """

    def __init__(self, plan: Plan, limits: Limits) -> None:
        self._plan = plan
        self._limits = limits
        self._queues = {
            "iq": Producer(limits.queue_length),
            "toq": Producer(limits.queue_length),
            "model": Producer(1),
            "snapshot": Producer(2),  # one to work from, one on its way
        }
        self._child: Child | None = None
        self._places: dict[str, Place] = {}
        self._shapes: list[object] = []
        self._pending: dict[int, Ticket] = {}
        self._reports: list[Report] = []
        self._precision = plan.precision
        self._trust = Trust(limits)
        self._past_cpu_s = self._child_cpu_s = 0.0
        self._snapshot_evaluation = 0
        self._num_refreshing = 0
        self._is_deaf = False
        self._has_stopped = False

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the controller processes so far."""
        return self._past_cpu_s + self._child_cpu_s

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
        if state is not None:
            self._precision = state.get("precision", self._precision)
        if state is not None or self._has_stopped:
            return False
        if self._child is None:
            self._start()
        snapshots = self._queues["snapshot"]
        tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
        try:
            shapes: list[object] = [(tensor.shape, tensor.dtype) for tensor in tensors]
            is_new = shapes != self._shapes
            if not snapshots.free or (is_new and len(snapshots.free) < len(snapshots.segments)):
                return False
            if is_new:
                self._places["model"] = self._pack_model(model, tensors)
            place = snapshots.put((tensors, batch))
        except Exception as error:
            raise ControllerError(f"the model cannot be sent to the controller process ({brief(error)})") from error
        assert place is not None
        self._shapes, self._snapshot_evaluation, self._places["snapshot"] = shapes, evaluation, place
        self._send_snapshot(with_model=is_new)
        return True

    def submit(self, request: Request) -> None:
        """Queue one evaluation; without room it is lost and reported so."""
        ticket = request.ticket
        try:
            reason = "the controller has ended" if self._has_stopped else self._queue(request)
        except Exception as error:
            self._reports.append(ticket.failed(error))
            return
        if reason:
            self._reports.append(ticket.lost(reason))
        else:
            self._pending[ticket.evaluation] = ticket

    def poll(self) -> ControllerStatus:
        """Return what happened since the last call; a process that died or hangs is replaced here.

        The first poll starts the process, so that it imports what it needs while the model bootstraps. One that dies
        while idle is replaced before it is needed.
        """
        if self._child is None and not self._has_stopped:
            self._start()
        elif self._child is not None:
            try:
                for message in self._child.receive():
                    self._hear(message)
            except (EOFError, OSError):
                self._replace("it died")
            else:
                self._look_after()
        reports, self._reports = self._reports, []
        return self._status(reports)

    def close(self, reason: str = "the run ended before the controller came to it") -> ControllerStatus:
        """End the process and give back the memory; evaluations under way are lost."""
        reports = [*self._reports, *(ticket.lost(reason) for ticket in self._pending.values())]
        self._end_child()
        self._has_stopped = True
        self._pending.clear()
        self._reports.clear()
        for queue in self._queues.values():
            queue.close()
        return self._status(reports)

    def state_dict(self) -> dict[str, Any]:
        """Return the number format; the reference itself starts anew from the weights of the resumed model."""
        return {"precision": self._precision}

    def _status(self, reports: list[Report]) -> ControllerStatus:
        return ControllerStatus(
            reports=reports,
            is_asynchronous=self._child is not None,
            has_ended=self._has_stopped,
            cpu_s=self.cpu_s,
        )

    # --- to the process ------------------------------------------------------------------------

    def _start(self) -> None:
        descriptors = {name: [entry.descriptor for entry in queue.segments] for name, queue in self._queues.items()}
        orders = {
            "queues": descriptors,
            "queue_length": self._limits.queue_length,
            "load_limit": self._limits.load_limit,
            "patience_s": self._limits.patience_s,
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "matmul_precision": torch.get_float32_matmul_precision(),
        }
        try:
            self._child = Child(orders, [entry for entries in descriptors.values() for entry in entries])
        except Exception as error:
            raise ControllerError(f"the controller process cannot be started ({brief(error)})") from error
        self._trust.begin()

    def _send(self, message: messages.ToController) -> None:
        """Send; where that fails `poll` replaces the process."""
        if self._child is None:
            return
        if not self._is_busy:
            self._trust.hear()  # it had nothing to say before
        try:
            self._child.send(message)
        except Exception:
            self._is_deaf = True

    def _send_snapshot(self, *, with_model: bool) -> None:
        if with_model:
            self._send(messages.TakeModel(self._places["model"], self._precision))
        self._num_refreshing += 1
        self._send(messages.TakeSnapshot(self._snapshot_evaluation, self._places["snapshot"]))

    def _pack_model(self, model: nn.Module, weights: list[Tensor]) -> Place:
        """Pack how the model is built; its weights follow with the snapshot."""
        models = self._queues["model"]
        models.empty()
        place = models.put((self._plan, model), hollow=weights)
        assert place is not None
        weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights)
        if place.size_bytes > max(LARGEST_SKELETON_BYTES, weights_bytes):
            raise ValueError(f"its classes and attributes carry {place.size_bytes / 2**20:.0f} MiB along")
        return place

    def _queue(self, request: Request) -> str:
        """Put batch and training output into their queues; return why not, if not."""
        if not (self._queues["iq"].free and self._queues["toq"].free):
            return "the controller is behind: its queues are full"
        ticket = request.ticket
        training = self._plan.reduce(request.activation)
        batch_place = self._queues["iq"].put((request.batch, RandomState.current()))
        try:
            output_place = self._queues["toq"].put(training)
        except Exception:
            if batch_place is not None:
                self._queues["iq"].release(batch_place.slot)
            raise
        assert batch_place is not None and output_place is not None
        num_rows = request.activation.shape[0]
        self._send(messages.TakeInput(ticket, batch_place, num_rows, training.is_gram))
        self._send(messages.TakeOutput(ticket.evaluation, output_place))
        return ""

    # --- from the process ----------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return bool(self._pending or self._num_refreshing) or not self._trust.is_up

    def _hear(self, message: messages.FromController) -> None:
        if isinstance(message, messages.Alive):
            self._trust.hear_breath()
            return
        self._trust.hear()
        if isinstance(message, messages.Ready):
            self._trust.hear_up()
        elif isinstance(message, messages.Emptied):
            if message.queue != "model":  # kept for a process that replaces this one
                self._queues[message.queue].release(message.slot)
        elif isinstance(message, messages.Unusable):
            raise ControllerError(f"the model cannot be rebuilt in the controller process ({message.reason})")
        elif isinstance(message, messages.Reports):
            self._child_cpu_s = message.cpu_s
            for report in message.reports:
                self._take_in(report)

    def _take_in(self, report: Report) -> None:
        if isinstance(report, Reading | ReadingDropped):
            if self._pending.pop(report.evaluation, None) is None:
                return
            self._trust.hear_reading()
        elif isinstance(report, RungTaken) and report.before:
            # A process that replaces this one begins where it ended. The first choice it makes by itself.
            self._precision = report.after.removesuffix("-static")
        elif isinstance(report, ReferenceRefreshed | FaultCaught):
            self._num_refreshing = max(0, self._num_refreshing - 1)
        self._reports.append(report)

    def _look_after(self) -> None:
        if self._is_deaf:
            self._replace("it does not read its messages")
            return
        if self._is_busy and self._trust.is_lost:
            self._replace(f"it gave no sign of life for {self._limits.timeout_s:g} s")

    # --- replacing it --------------------------------------------------------------------------

    def _replace(self, reason: str) -> None:
        """End the process and start another, which gets the model and the last snapshot again."""
        how = self._end_child()
        reason = f"{reason} ({how})"
        if self._trust.has_proved_impossible:
            raise ControllerError(f"the controller process does not come up: {reason}")
        self._reports += [ticket.lost(f"the controller was replaced: {reason}") for ticket in self._pending.values()]
        self._pending.clear()
        if not self._trust.allow_restart():
            self._has_stopped = True
            times = f"{self._trust.num_restarts} times, last because {reason}"
            self._reports.append(Declined(step=0, what="judging plasticity", reason=f"it ended {times}"))
            return
        self._start()
        self._reports.append(ControllerRestarted(step=0, count=self._trust.num_restarts, reason=reason))
        if "snapshot" in self._places:
            self._send_snapshot(with_model=True)

    def _end_child(self) -> str:
        child, self._child = self._child, None
        self._num_refreshing, self._is_deaf = 0, False
        self._past_cpu_s, self._child_cpu_s = self.cpu_s, 0.0
        self._queues["iq"].empty()
        self._queues["toq"].empty()
        newest = self._places.get("snapshot")  # stays for a process that replaces this one
        self._queues["snapshot"].empty(but=newest.slot if newest else None)
        return child.end() if child is not None else ""
