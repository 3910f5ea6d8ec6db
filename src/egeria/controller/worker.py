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
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import nn

from egeria.controller.inline import Answer, InlineController, Report, Ticket
from egeria.errors import brief
from egeria.model.hooks import without_watchers

WATCH_EVERY_S, LOOK_EVERY_S = 0.5, 0.2


class Message(NamedTuple):
    """To the process: what it is about lies in a file.

    Attributes:
        file: index of the file.
        ticket: of an evaluation; None for a snapshot of the model.
    """

    file: int
    ticket: Ticket | None = None


def handle(controller: InlineController, files: Sequence[int], message: Message) -> list[Report]:
    """Take over a snapshot or make an evaluation, in either process; return what came of it."""
    content = unpack(files[message.file])
    if message.ticket is None:
        controller.refresh(*content)
    else:
        batch, random_state, training_BB = content
        random_state.set()  # as it was when the evaluation was asked for
        controller.evaluate(message.ticket, batch, training_BB)
    return controller.poll()


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
    try:
        plan, files, waits, dtype, precision = pipe.recv()
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        controller = InlineController(plan)
        while True:
            message = pipe.recv()
            _wait_for_room(*waits)
            pipe.send((_answer(controller, files, message), time.process_time()))
    except (EOFError, OSError):
        os._exit(0)  # at once: an interpreter with torch in it takes its time to shut down


def _answer(
    controller: InlineController, files: Sequence[int], message: Message
) -> list[Report] | str:
    """Return what came of a message, or why nothing did."""
    try:
        reports = handle(controller, files, message)
    except (Exception, SystemExit) as error:  # a script that is imported for its classes may exit
        return brief(error)
    failures = [report.reason for report in reports if isinstance(report, Answer) and report.reason]
    return failures[0] if failures else reports


def _wait_for_room(load_limit: float, patience_s: float) -> None:
    """Wait while all processors are busier than a limit; 1 never waits."""
    import psutil  # noqa: PLC0415  (only the controller process waits for it)

    ends = time.monotonic() + patience_s
    while load_limit < 1 and time.monotonic() < ends:
        if psutil.cpu_percent(LOOK_EVERY_S) <= 100 * load_limit:
            break


def _end_behind(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_EVERY_S)
    os._exit(0)


def pack(content: Any, file: int) -> None:
    """Write an object to a file, in place of what is in it."""
    with os.fdopen(file, "wb", closefd=False) as stream:
        stream.seek(0)
        torch.save(content, stream, _SENDING, pickle.HIGHEST_PROTOCOL)
        stream.truncate()


def unpack(file: int) -> Any:
    """Return what was packed, with its tensors on the CPU."""
    with os.fdopen(file, "rb", closefd=False) as stream:
        stream.seek(0)
        return torch.load(stream, map_location="cpu", weights_only=False)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends modules without what only watches them: a reference runs without it."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, nn.Module):
            return super().reducer_override(thing)
        try:
            reduced: Any = thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        except RuntimeError:  # parametrized modules refuse, for the sake of files
            reduced = copyreg.__newobj__, (type(thing),), vars(thing)  # type: ignore[attr-defined]
        make, arguments, *rest = reduced
        if rest and isinstance(rest[0], dict):
            rest[0] = without_watchers(rest[0])
        return (make, arguments, *rest)


# What `torch.save` asks a module for pickling for.
_SENDING = SimpleNamespace(__name__=__name__, Pickler=_Pickler)
