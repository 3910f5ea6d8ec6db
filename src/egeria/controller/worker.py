"""The controller process: runs the reference and compares, while the training continues beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from torch import nn

from egeria.controller.inline import Assessor
from egeria.controller.launch import (
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
    is_writable,
)
from egeria.controller.protocol import Report, brief
from egeria.controller.shared_memory import Segment, unpack
from egeria.events import FaultCaught, ReferenceRefreshed
from egeria.reference import warm_up

LOOK_EVERY_S = 0.1
WATCH_EVERY_S = 0.5
HYSTERESIS = 0.05
SAMPLE_S = 0.2


def main(
    *,
    pipe: int,
    parent: int,
    queues: Mapping[str, Sequence[int]],
    load_limit: float,
    patience_s: float,
    default_dtype: str,
    matmul_precision: str,
) -> None:
    """Serve until the training process is gone; all arguments are plain values.

    Args:
        pipe: descriptor of our end.
        parent: number of the training process.
        queues: descriptors of the segments of each queue.
        load_limit: of the gate.
        patience_s: of the gate.
        default_dtype: of the training process, as is `matmul_precision`.
        matmul_precision: of `torch.set_float32_matmul_precision`.
    """
    sender = Sender(Connection(pipe))
    lower_priority()
    watch_parent(parent, sender)
    status = 0
    try:
        warm_up()
        torch.set_default_dtype(getattr(torch, default_dtype))
        torch.set_float32_matmul_precision(matmul_precision)
        Server(sender, queues, LoadGate(load_limit, patience_s)).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the training process has closed its end
    except BaseException:
        traceback.print_exc()
        status = 1
    # At once: an interpreter that shuts down with torch in it takes its time, and nothing here is left to save.
    sys.stderr.flush()
    os._exit(status)


def lower_priority() -> None:
    """Take one thread and a low priority, and ignore Ctrl-C, which is for the training process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # never preempts a running thread
    with contextlib.suppress(OSError):
        os.nice(5)  # 10 starved it: a first build took 19 s on a busy machine


def watch_parent(parent: int, sender: Sender) -> None:
    """End this process when the training process is gone; send heartbeats while it computes."""

    def watch() -> None:
        # A closed pipe is no sure sign: data workers forked from the training process hold its end open.
        spent_s = 0.0
        while os.getppid() == parent:
            time.sleep(WATCH_EVERY_S)
            if time.process_time() - spent_s > WATCH_EVERY_S / 10:  # it computes: no hanging, however long it takes
                spent_s = time.process_time()
                with contextlib.suppress(OSError):
                    sender.send_heartbeat()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


class Sender:
    """The pipe to the training process, for the thread that works and the one that sends heartbeats."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._lock = threading.Lock()

    def send(self, message: FromController) -> None:
        """Send a message, however long that takes."""
        with self._lock:
            self.pipe.send(message)

    def send_heartbeat(self) -> None:
        """Send that this process is alive, if that is possible at once."""
        if self._lock.acquire(blocking=False):
            try:
                if is_writable(self.pipe):
                    self.pipe.send(Heartbeat())
            finally:
                self._lock.release()


class Server:
    """Works through the messages in order, while the gate allows it.

    Args:
        sender: to the training process.
        queues: descriptors of the segments of each queue.
        gate: when there is room for work.
    """

    def __init__(self, sender: Sender, queues: Mapping[str, Sequence[int]], gate: LoadGate) -> None:
        self._sender = sender
        self._pipe = sender.pipe
        self._queues = {name: [Segment(entry) for entry in descriptors] for name, descriptors in queues.items()}
        self._gate = gate
        self._work: deque[ToController] = deque()
        self._model: nn.Module | None = None
        self._assessor: Assessor | None = None

    def serve(self) -> None:
        """Serve until the training process closes its end."""
        self._sender.send(Ready())
        while True:
            if self._pipe.poll(0):
                self._work.append(self._pipe.recv())  # at once, so that the pipe never fills up
            elif self._work and self._gate.lets_through():
                self._do(self._work.popleft())
            elif self._pipe.poll(LOOK_EVERY_S if self._work else None):
                self._work.append(self._pipe.recv())
            else:
                self._sender.send_heartbeat()  # it waits for room

    def _do(self, message: ToController) -> None:
        if isinstance(message, TakeModel):
            self._take_model(message)
        elif isinstance(message, TakeSnapshot):
            self._take_snapshot(message)
        else:
            self._evaluate(message)

    def _take_model(self, message: TakeModel) -> None:
        try:
            plan, self._model = self._take("model", message)
            self._assessor = Assessor(replace(plan, precision=message.precision))
        except Exception as error:
            self._sender.send(Unusable(brief(error)))

    def _take_snapshot(self, message: TakeSnapshot) -> None:
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        evaluation = message.evaluation
        try:
            tensors, batch = self._take("snapshot", message)
            if self._model is None or self._assessor is None:
                raise RuntimeError("there is no model to put the weights into")
            with torch.no_grad():
                for mine, theirs in zip((*self._model.parameters(), *self._model.buffers()), tensors, strict=True):
                    mine.copy_(theirs)
            reports = self._assessor.refresh(evaluation, self._model, batch)
        except Exception as error:
            reports = [FaultCaught(step=0, where="refreshing the reference", error=brief(error), count=1)]
        spent = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        self._report(*(_with_cost(report, *spent) for report in reports))

    def _evaluate(self, message: TakeEvaluation) -> None:
        ticket, begin_s = message.ticket, time.process_time()
        try:
            batch, random_state, num_rows, training = self._take("evaluation", message)
            random_state.set()
            if self._assessor is None:
                raise RuntimeError("there is no reference model")
            reference = self._assessor.run_reference(ticket.tap, batch, num_rows, as_gram=training.is_gram)
        except Exception as error:
            self._report(ticket.failed(error))
            return
        cpu_s = time.process_time() - begin_s
        self._report(*self._assessor.conclude(ticket, training, reference, cpu_s))

    def _take(self, queue: str, message: ToController) -> Any:
        try:
            return unpack(self._queues[queue][message.slot.number], message.slot.size_bytes)
        finally:
            self._sender.send(Freed(queue, message.slot.number))

    def _report(self, *reports: Report) -> None:
        self._sender.send(Reports(reports, time.process_time()))


def _with_cost(report: Report, wall_s: float, cpu_s: float) -> Report:
    if not isinstance(report, ReferenceRefreshed):
        return report
    return replace(report, controller_wall_s=wall_s, controller_cpu_s=cpu_s)


class LoadGate:
    """Closed while the rest of the machine is busier than `limit`, but never for longer than `patience_s`.

    Args:
        limit: share of all processors, 0 to 1; 1 keeps it open.
        patience_s: seconds of waiting after which one evaluation goes through all the same.
        load: returns the share of all processors that others are using.
        clock: seconds.
    """

    def __init__(
        self,
        limit: float,
        patience_s: float,
        load: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._patience_s = patience_s
        self._load = load or RestOfMachine()
        self._clock = clock
        self._sampled_at = clock()
        self._is_open = limit >= 1
        self._waiting_since: float | None = None

    def lets_through(self) -> bool:
        """Return whether an evaluation that is waiting may run now."""
        if self._limit >= 1:
            return True
        now = self._clock()
        if now - self._sampled_at >= SAMPLE_S:
            self._sampled_at = now
            # Once closed it takes a little less load to open, so that it does not flutter.
            self._is_open = self._load() <= (self._limit if self._is_open else self._limit - HYSTERESIS)
        if self._is_open:
            self._waiting_since = None
            return True
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < self._patience_s:
            return False
        self._waiting_since = None
        return True


class RestOfMachine:
    """The load of all other processes since the last call, as a share of all processors."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._own_s, self._at_s = self._read()
        psutil.cpu_percent(interval=None)

    def __call__(self) -> float:
        """Return the load, 0 to 1."""
        everyone = psutil.cpu_percent(interval=None) / 100
        own_s, at_s = self._read()
        elapsed_s = max(at_s - self._at_s, 1e-6) * (psutil.cpu_count() or 1)
        own = (own_s - self._own_s) / elapsed_s
        self._own_s, self._at_s = own_s, at_s
        return min(1.0, max(0.0, everyone - own))

    def _read(self) -> tuple[float, float]:
        times = self._process.cpu_times()
        return times.user + times.system, time.monotonic()
