"""The controller process: runs the reference and compares, while the training goes on beside it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from egeria.controller.assessor import Assessor, Output
from egeria.controller.gate import LoadGate
from egeria.controller.messages import (
    Alive,
    Emptied,
    FromController,
    Ready,
    Reports,
    TakeInput,
    TakeModel,
    TakeOutput,
    TakeSnapshot,
    ToController,
    Unusable,
)
from egeria.controller.protocol import Report, Ticket, brief
from egeria.controller.queues import Consumer
from egeria.events import FaultCaught, ReferenceRefreshed
from egeria.reference import warm_up

LOOK_EVERY_S = 0.1
WATCH_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the training process starts the controller with; plain values."""

    pipe: int
    parent: int
    queues: dict[str, list[int]]
    """Descriptors of the segments of each queue."""
    queue_length: int
    load_limit: float
    patience_s: float
    default_dtype: str
    matmul_precision: str


def main(**orders: Any) -> None:
    """Serve until the training process is gone."""
    settings = Orders(**orders)
    voice = Voice(Connection(settings.pipe))
    behave(settings.parent, voice)
    status = 0
    try:
        warm_up()
        torch.set_default_dtype(getattr(torch, settings.default_dtype))
        torch.set_float32_matmul_precision(settings.matmul_precision)
        gate = LoadGate(settings.load_limit, settings.patience_s)
        Server(voice, settings.queues, gate, settings.queue_length).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the training process has let go
    except BaseException:
        traceback.print_exc()
        status = 1
    # At once: an interpreter that shuts down with torch in it takes its time, and nothing here is left to save.
    sys.stderr.flush()
    os._exit(status)


class Voice:
    """The pipe to the training process, for the thread that works and the one that breathes."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._lock = threading.Lock()
        self._writable = select.poll()
        self._writable.register(pipe.fileno(), select.POLLOUT)

    def say(self, message: FromController) -> None:
        """Send a message, however long that takes."""
        with self._lock:
            self.pipe.send(message)

    def breathe(self) -> None:
        """Say that this process is alive, if that is possible at once."""
        if self._lock.acquire(blocking=False):
            try:
                if any(event & select.POLLOUT for _, event in self._writable.poll(0)):
                    self.pipe.send(Alive())
            finally:
                self._lock.release()


def behave(parent: int, voice: Voice) -> None:
    """Be a quiet neighbour: one thread, low priority, deaf to Ctrl-C, and gone when the training is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # never interrupts who is running
    with contextlib.suppress(OSError):
        os.nice(5)  # 10 starved it: a first build took 19 s on a busy machine

    def watch() -> None:
        # The pipe alone would not tell: data workers forked from the training process hold its end open.
        spent_s = 0.0
        while os.getppid() == parent:
            time.sleep(WATCH_EVERY_S)
            if time.process_time() - spent_s > WATCH_EVERY_S / 10:  # it computes: no hanging, however long it takes
                spent_s = time.process_time()
                with contextlib.suppress(OSError):
                    voice.breathe()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


class Server:
    """Takes messages in at once, and works through them in order while the gate lets it.

    Args:
        voice: to the training process.
        queues: descriptors of the segments of each queue.
        gate: when there is room for work.
        length: of the queue of reference outputs.
    """

    def __init__(self, voice: Voice, queues: Mapping[str, Sequence[int]], gate: LoadGate, length: int) -> None:
        self._voice = voice
        self._pipe = voice.pipe
        self._queues = {name: Consumer(descriptors) for name, descriptors in queues.items()}
        self._gate = gate
        self._work: deque[TakeModel | TakeSnapshot | TakeInput] = deque()
        self._reference_outputs: deque[tuple[Ticket, Output, float]] = deque(maxlen=length)
        self._training_outputs: dict[int, Output | Exception] = {}
        self._newest_failure = -1
        self._model: nn.Module | None = None
        self._assessor: Assessor | None = None

    def serve(self) -> None:
        """Serve until the training process closes its end."""
        self._send(Ready())
        while True:
            if self._pipe.poll(0):
                self._accept(self._pipe.recv())
            elif self._work and self._gate.lets_through():
                self._do(self._work.popleft())
                self._pair()
            elif self._pipe.poll(LOOK_EVERY_S if self._work else None):
                self._accept(self._pipe.recv())
            else:
                self._voice.breathe()  # it waits for room

    def _accept(self, message: ToController) -> None:
        if not isinstance(message, TakeOutput):
            self._work.append(message)
            return
        output: Output | Exception
        try:
            output = self._take("toq", message)
        except Exception as error:
            output = error
        if message.evaluation > self._newest_failure:
            self._training_outputs[message.evaluation] = output
            self._pair()

    def _do(self, message: TakeModel | TakeSnapshot | TakeInput) -> None:
        if isinstance(message, TakeModel):
            self._take_model(message)
        elif isinstance(message, TakeSnapshot):
            self._take_snapshot(message)
        else:
            self._run_reference(message)

    def _take_model(self, message: TakeModel) -> None:
        try:
            plan, self._model = self._take("model", message)
            self._assessor = Assessor(plan.beginning_at(message.precision))
        except Exception as error:
            self._send(Unusable(brief(error)))

    def _take_snapshot(self, message: TakeSnapshot) -> None:
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        evaluation = message.evaluation
        try:
            tensors, batch = self._take("snapshot", message)
            if self._model is None or self._assessor is None:
                raise RuntimeError("there is no model to put the weights into")
            with torch.no_grad():
                for mine, theirs in zip(weights(self._model), tensors, strict=True):
                    mine.copy_(theirs)
            reports = self._assessor.refresh(evaluation, self._model, batch)
        except Exception as error:
            reports = [FaultCaught(step=0, where="refreshing the reference", error=brief(error), count=1)]
        spent = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        self._report(*(_with_cost(report, *spent) for report in reports))

    def _run_reference(self, message: TakeInput) -> None:
        ticket, begin_s = message.ticket, time.process_time()
        try:
            batch, random_state = self._take("iq", message)
            random_state.set()
            if self._assessor is None:
                raise RuntimeError("there is no reference model")
            output = self._assessor.run_reference(ticket.tap, batch, message.num_rows, as_gram=message.as_gram)
        except Exception as error:
            self._newest_failure = ticket.evaluation
            self._training_outputs.pop(ticket.evaluation, None)
            self._report(ticket.failed(error))
            return
        self._reference_outputs.append((ticket, output, begin_s))

    def _pair(self) -> None:
        """Compare what both models have put out; by the number of the evaluation, never by order alone."""
        waiting = len(self._reference_outputs)
        for _ in range(waiting):
            ticket, reference, begin_s = self._reference_outputs.popleft()
            training = self._training_outputs.pop(ticket.evaluation, None)
            if training is None:
                self._reference_outputs.append((ticket, reference, begin_s))
            elif isinstance(training, Exception):
                self._report(ticket.failed(training))
            elif self._assessor is not None:
                cpu_s = time.process_time() - begin_s
                self._report(*self._assessor.conclude(ticket, training, reference, cpu_s))

    def _take(self, queue: str, message: TakeModel | TakeSnapshot | TakeInput | TakeOutput) -> Any:
        try:
            return self._queues[queue].take(message.place)
        finally:
            self._send(Emptied(queue, message.place.slot))

    def _report(self, *reports: Report) -> None:
        self._send(Reports(reports, time.process_time()))

    def _send(self, message: FromController) -> None:
        self._voice.say(message)


def weights(model: nn.Module) -> list[Tensor]:
    """Return the tensors of a model that a snapshot holds."""
    return [*model.parameters(), *model.buffers()]


def _with_cost(report: Report, wall_s: float, cpu_s: float) -> Report:
    if not isinstance(report, ReferenceRefreshed):
        return report
    return replace(report, controller_wall_s=wall_s, controller_cpu_s=cpu_s)
