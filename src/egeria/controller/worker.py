"""What the controller process runs, and how models and batches reach it.

Both processes know the same files without names, in memory, so that nothing is left behind however
they end. Classes of the user's script travel by value (cloudpickle): the script is never run again.
"""

from __future__ import annotations

import contextlib
import copyreg
import os
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import nn

from egeria.controller.inline import EvaluationPlan, InlineController
from egeria.controller.protocol import EvaluationFailed, Report, Ticket
from egeria.errors import brief
from egeria.model.copies import without_wrappers

WATCH_EVERY_S, LOOK_EVERY_S = 0.5, 0.2


class Message(NamedTuple):
    """To the process: a snapshot of the model, or an evaluation, lies in a file."""

    file: int
    """Index of the file."""
    evaluation: int
    ticket: Ticket | None = None
    """None for a snapshot."""


class Worker:
    """Handles messages in the order in which they were sent, here or in the controller process.

    Args:
        plan: how to evaluate.
        files: descriptors of what the messages are about.
    """

    def __init__(self, plan: EvaluationPlan, files: Sequence[int]) -> None:
        self.controller, self._files = InlineController(plan), files

    def handle(self, message: Message) -> list[Report]:
        """Take over a snapshot, or make an evaluation; return what came of it.

        Random numbers go on from where they were when the evaluation was asked for.
        """
        content = unpack(self._files[message.file])
        if message.ticket is None:
            self.controller.refresh(message.evaluation, *content)
        else:
            batch, random_state, training = content
            random_state.set()
            self.controller.evaluate(message.ticket, batch, training)
        return self.controller.poll().reports


def main(descriptor: int, parent: int) -> None:
    """Answer the messages of a pipe until its other end is closed, or the parent is gone."""
    # A closed pipe is no sure sign of that: data workers forked from the training process hold its
    # end open.
    threading.Thread(target=_end_behind, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(5)  # 10 starved it: a first build took 19 s on a busy machine
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # never preempts a thread
    pipe = Connection(descriptor)
    plan, files, config, dtype, precision = pipe.recv()
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    worker = Worker(plan, files)
    try:
        while True:
            message = pipe.recv()
            _wait_for_room(config.load_limit, config.patience_s)
            pipe.send((_answer(worker, message), time.process_time()))
    except (EOFError, OSError):
        os._exit(0)  # at once: an interpreter with torch in it takes its time to shut down


def _answer(worker: Worker, message: Message) -> list[Report] | str:
    """Return what came of a message, or why nothing did."""
    try:
        reports = worker.handle(message)
    except (Exception, SystemExit) as error:  # a script that is imported for its classes may exit
        return brief(error)
    failures = [report.reason for report in reports if isinstance(report, EvaluationFailed)]
    return failures[0] if failures else reports


def _end_behind(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_EVERY_S)
    os._exit(0)


def _wait_for_room(load_limit: float, patience_s: float) -> None:
    """Wait while all processors are busier than a limit; 1 never waits."""
    import psutil  # noqa: PLC0415  (only the controller process waits for it)

    ends = time.monotonic() + patience_s
    while load_limit < 1 and time.monotonic() < ends:
        if psutil.cpu_percent(LOOK_EVERY_S) <= 100 * load_limit:
            break


def pack(content: Any, file: int) -> None:
    """Write an object to a file, in place of what is in it."""
    with os.fdopen(file, "wb", closefd=False) as stream:
        stream.seek(0)
        torch.save(content, stream, _Sending, pickle.HIGHEST_PROTOCOL)
        stream.truncate()


def unpack(file: int) -> Any:
    """Return what was packed, with its tensors on the CPU."""
    with os.fdopen(file, "rb", closefd=False) as stream:
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=False)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends modules without the hooks that only watch: a reference runs without them."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, nn.Module):
            return super().reducer_override(thing)
        try:
            reduced: Any = thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except RuntimeError:  # parametrized modules refuse, for the sake of files
            reduced = copyreg.__newobj__, (type(thing),), vars(thing)  # type: ignore[attr-defined]
        make, arguments, *rest = reduced
        if rest and isinstance(rest[0], dict):
            rest[0] = {
                name: OrderedDict() if name in _SILENT_HOOKS else value
                for name, value in without_wrappers(rest[0]).items()
            }
        return (make, arguments, *rest)


class _Sending:
    """What `torch.save` asks a module for pickling for."""

    Pickler = _Pickler


# Forward pre-hooks are sent: some compute weights.
_SILENT_HOOKS = {name for name in vars(nn.Module()) if name.endswith("_hooks")} - {
    "_forward_pre_hooks"
}
