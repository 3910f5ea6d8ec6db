"""Running a function in the processes of a job, as `torchrun` would start them."""

from __future__ import annotations

import atexit
import datetime
import gc
import multiprocessing
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

TIMEOUT_S = 60.0
LONGEST_S = 240.0
Answer = tuple[bool, Any]
"""Whether the function returned, and what; else the traceback."""


def replica(model: nn.Module) -> nn.Module:
    """Return the model in `DistributedDataParallel`; as it is in a process of its own."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return model
    return DistributedDataParallel(model, find_unused_parameters=True)


class Pool:
    """Processes that run one job after the other, each job in a process group and a directory of its own.

    Starting a process and importing torch takes seconds, setting up a process group takes milliseconds. A pool in
    which a job failed is not to be used again: its processes may still wait for each other.
    """

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(size)]
        self.connections = [ours for ours, _ in pairs]
        self.processes = [context.Process(target=_serve, args=(rank, pairs[rank][1])) for rank in range(size)]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()  # so that the death of a process is seen as the end of its connection

    def run(self, num_ranks: int, timeout_s: float, work: Callable[..., Any], arguments: Any) -> list[Answer]:
        """Return the answer of each of the first `num_ranks` processes; those that do not answer in time are killed."""
        deadline = time.monotonic() + LONGEST_S
        answers: list[Answer] = [(False, "it ended without an answer")] * num_ranks
        with tempfile.TemporaryDirectory() as folder:
            job = pickle.dumps((num_ranks, folder, timeout_s, work, arguments))
            waiting = {connection: rank for rank, connection in enumerate(self.connections[:num_ranks])}
            for connection in waiting:
                connection.send_bytes(job)
            while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
                for connection in ready:
                    rank = waiting.pop(connection)
                    try:
                        answers[rank] = pickle.loads(connection.recv_bytes())
                    except (EOFError, ConnectionError):  # the process has died
                        continue
            for rank in waiting.values():
                answers[rank] = False, f"it did not answer within {LONGEST_S:.0f} s"
        return answers

    def close(self, *, kill: bool = False) -> None:
        """End the processes: at once, or when they have seen that no job will come."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            if kill:
                process.kill()
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()


_pools: dict[int, Pool] = {}
"""By their number of processes, the pools of the test session for which a test has asked."""
_last_group: list[Any] = []
"""In a process of a pool: the process group of the newest job, until the next one has its own."""


def run_ranks(
    work: Callable[..., Any], *arguments: Any, num_ranks: int = 2, timeout_s: float = TIMEOUT_S, fresh: bool = False
) -> list[Any]:
    """Return what `work(*arguments)` returns in each process of a gloo job, by rank.

    Args:
        work: a function at the top of a module.
        arguments: for each process the same.
        num_ranks: processes.
        timeout_s: of the process group.
        fresh: whether the processes are started for this job alone, because it kills them or leaves them hanging.
    """
    size = max(2, num_ranks)
    pool = (None if fresh else _pools.pop(size, None)) or Pool(size)
    answers: list[Answer] = []
    try:
        answers = pool.run(num_ranks, timeout_s, work, arguments)
    finally:
        if not fresh and answers and all(returned for returned, _ in answers):
            _pools[size] = pool
        else:
            pool.close(kill=True)
    failed = [f"rank {rank}:\n{answer}" for rank, (returned, answer) in enumerate(answers) if not returned]
    assert not failed, "\n".join(failed)
    return [answer for _, answer in answers]


def run_cases(work: Callable[..., Any], cases: Sequence[Any], **options: Any) -> dict[Any, list[Any]]:
    """Return for each case what `work(case)` returns in each process, all cases in one process group."""
    answers = run_ranks(_work_through, work, list(cases), **options)
    return {case: [found[index] for found in answers] for index, case in enumerate(cases)}


@atexit.register
def _close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


def _work_through(work: Callable[..., Any], cases: list[Any]) -> list[Any]:
    return [work(case) for case in cases]


def _serve(rank: int, connection: Connection) -> None:
    """Run jobs until the connection ends, which it does with the process of the tests too."""
    while True:
        try:
            job = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        connection.send_bytes(pickle.dumps(_answer(rank, job)))


def _answer(rank: int, job: bytes) -> Answer:
    try:
        num_ranks, folder, timeout_s, work, arguments = pickle.loads(job)
        with _own_state(folder, num_ranks):
            distributed.init_process_group(
                "gloo",
                store=distributed.FileStore(str(Path(folder, "store")), num_ranks),
                rank=rank,
                world_size=num_ranks,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
            # A group that is let go of first by its own thread, as PowerSGD's callbacks do, ends the process.
            _last_group[:] = [distributed.group.WORLD]
            try:
                return True, work(*arguments)
            except BaseException:
                _last_group.clear()  # so that the other process sees at once that nobody will answer it
                raise
            finally:
                distributed.destroy_process_group()
    except BaseException:
        return False, traceback.format_exc()


@contextmanager
def _own_state(folder: str, num_ranks: int) -> Iterator[None]:
    """Give a job what a fresh process has: directory, environment, random numbers, threads, formats, warnings."""
    environment, directory = dict(os.environ), Path.cwd()
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    os.chdir(folder)  # journals of runs without a path of their own go there
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()  # what runs have left open ends before the next job
        gc.freeze()  # and the modules of torch are not looked through each time
