"""The controller process: runs the reference and compares, while the training
continues beside it.
"""

from __future__ import annotations

import contextlib
import functools
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

from egeria.controller.child import (
    Freed,
    Heartbeat,
    Reports,
    TakeEvaluation,
    TakeSnapshot,
    Unusable,
    is_writable,
)
from egeria.controller.inline import InlineController
from egeria.controller.protocol import Report
from egeria.controller.shared_memory import Segment, unpack
from egeria.errors import brief
from egeria.events import FaultCaught, ReferenceRefreshed
from egeria.policy import Reading
from egeria.reference import warm_up

LOOK_EVERY_S = 0.1
WATCH_EVERY_S = 0.5
HYSTERESIS = 0.05
SAMPLE_S = 0.2


def main(
    *,
    pipe: int,
    parent: int,
    memory: Mapping[str, Sequence[int]],
    load_limit: float,
    patience_s: float,
    default_dtype: str,
    matmul_precision: str,
) -> None:
    """Serve until the training process is gone; pipe and memory are descriptors, the rest are its
    settings.
    """
    server = Server(Connection(pipe), memory)
    lower_priority()
    threading.Thread(target=server.watch, args=(parent,), daemon=True).start()
    status = 0
    try:
        warm_up()
        torch.set_default_dtype(getattr(torch, default_dtype))
        torch.set_float32_matmul_precision(matmul_precision)
        server.serve(
            LoadGate(load_limit, patience_s, functools.partial(load_of_others, psutil.Process()))
        )
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the training process has closed its end
    except BaseException:
        traceback.print_exc()
        status = 1
    # At once: an interpreter that shuts down with torch in it takes its time, and nothing here is
    # left to save.
    sys.stderr.flush()
    os._exit(status)


def lower_priority() -> None:
    """Take one thread and a low priority, and ignore Ctrl-C, which is meant for the training
    process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(
            0, os.SCHED_BATCH, os.sched_param(0)
        )  # never preempts a running thread
    with contextlib.suppress(OSError):
        os.nice(5)  # 10 starved it: a first build took 19 s on a busy machine


class Server:
    """Works through the messages in order, while there is room for work."""

    def __init__(self, pipe: Connection, memory: Mapping[str, Sequence[int]]) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()
        self._memory = {
            name: [Segment(entry) for entry in descriptors] for name, descriptors in memory.items()
        }
        self._work: deque[TakeSnapshot | TakeEvaluation] = deque()
        self._model: nn.Module | None = None
        self._controller: InlineController | None = None

    def watch(self, parent: int) -> None:
        """End this process when the training process is gone; send heartbeats while it computes."""
        # A closed pipe is no sure sign: data workers forked from the training process hold its end
        # open.
        spent_s = 0.0
        while os.getppid() == parent:
            time.sleep(WATCH_EVERY_S)
            if (
                time.process_time() - spent_s > WATCH_EVERY_S / 10
            ):  # it computes: no hanging, however long it takes
                spent_s = time.process_time()
                with contextlib.suppress(OSError):
                    self._send_heartbeat()
        os._exit(0)

    def serve(self, gate: LoadGate) -> None:
        """Serve until the training process closes its end, and work when the gate is open."""
        self._report()
        while True:
            if self._pipe.poll(0):
                self._work.append(self._pipe.recv())  # at once, so that the pipe never fills up
            elif self._work and gate.lets_through():
                message = self._work.popleft()
                if isinstance(message, TakeSnapshot):
                    self._refresh(message)
                else:
                    self._evaluate(message)
            elif not self._pipe.poll(LOOK_EVERY_S if self._work else None):
                self._send_heartbeat()  # it waits for room

    def _refresh(self, message: TakeSnapshot) -> None:
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        try:
            if message.model_bytes is not None:
                plan, self._model = unpack(self._memory["model"][0], message.model_bytes)
                self._controller = InlineController(replace(plan, precision=message.precision))
        except (
            Exception,
            SystemExit,
        ) as error:  # a script without a guard may read arguments of its own, and exit
            self._send(Unusable(brief(error)))
            return
        assert self._model is not None and self._controller is not None
        try:
            tensors, batch = self._take("snapshot", message)
            with torch.no_grad():
                for mine, theirs in zip(
                    (*self._model.parameters(), *self._model.buffers()), tensors, strict=True
                ):
                    mine.copy_(theirs)
            self._controller.refresh(message.evaluation, self._model, batch)
        except Exception as error:
            self._report(
                FaultCaught(step=0, where="refreshing the reference", error=brief(error), count=1)
            )
            return
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        *changes, refreshed = self._controller.poll().reports
        assert isinstance(refreshed, ReferenceRefreshed)
        self._report(*changes, replace(refreshed, controller_wall_s=wall_s, controller_cpu_s=cpu_s))

    def _evaluate(self, message: TakeEvaluation) -> None:
        ticket, begin_s = message.ticket, time.process_time()
        try:
            batch, random_state, training = self._take("evaluation", message)
            random_state.set()
            assert self._controller is not None
            self._controller.evaluate(ticket, batch, training)
        except Exception as error:
            self._report(ticket.failed(error))
            return
        result, *others = self._controller.poll().reports
        if isinstance(result, Reading):
            result = replace(result, controller_cpu_s=time.process_time() - begin_s)
        self._report(result, *others)

    def _take(self, queue: str, message: TakeSnapshot | TakeEvaluation) -> Any:
        try:
            return unpack(self._memory[queue][message.slot.number], message.slot.size_bytes)
        finally:
            self._send(Freed(queue, message.slot.number))

    def _report(self, *reports: Report) -> None:
        self._send(Reports(reports, time.process_time()))

    def _send(self, message: Freed | Unusable | Reports) -> None:
        with self._sending:  # two threads send
            self._pipe.send(message)

    def _send_heartbeat(self) -> None:
        """Send that this process is alive, if that is possible at once."""
        if self._sending.acquire(blocking=False):
            try:
                if is_writable(self._pipe):
                    self._pipe.send(Heartbeat())
            finally:
                self._sending.release()


class LoadGate:
    """Closed while others use more than `limit` of all processors (1: never), for `patience_s` at
    most.
    """

    def __init__(
        self,
        limit: float,
        patience_s: float,
        load: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._patience_s, self._load, self._clock = limit, patience_s, load, clock
        self._sampled_at = clock()
        self._is_open = False
        self._waiting_since: float | None = None

    def lets_through(self) -> bool:
        """Return whether an evaluation that is waiting may run now."""
        if self._limit >= 1:
            return True
        now = self._clock()
        if now - self._sampled_at >= SAMPLE_S:
            self._sampled_at = now
            # Once closed it takes a little less load to open, so that it does not flutter.
            self._is_open = self._load() <= (
                self._limit if self._is_open else self._limit - HYSTERESIS
            )
        since = now if self._waiting_since is None else self._waiting_since
        lets_through = self._is_open or now - since >= self._patience_s
        self._waiting_since = None if lets_through else since
        return lets_through


def load_of_others(process: psutil.Process) -> float:
    """Return the share of all processors, 0 to 1, that other processes have used since the last
    call.
    """
    own = process.cpu_percent() / (psutil.cpu_count() or 1)
    return min(1.0, max(0.0, (psutil.cpu_percent() - own) / 100))
