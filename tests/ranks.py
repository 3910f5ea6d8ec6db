"""Running a function in the processes of a job, as `torchrun` would start them."""

import atexit
import contextlib
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
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS, GROUP_TIMEOUT_S, LONGEST_S = 2, 60.0, 240.0
_last_group: list[Any] = []
"""In one of the processes: the process group of the newest job, until the next one has its own."""


def replica(model: nn.Module) -> nn.Module:
    """Return the model in `DistributedDataParallel`; as it is in a process of its own."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return model
    return DistributedDataParallel(model, find_unused_parameters=True)


class Ranks:
    """Processes that run one job after the other, each job in a process group and a directory of its own.

    Starting a process and importing torch takes seconds, setting up a process group takes milliseconds. After a job
    that failed they are started anew, since one may still wait for the other.
    """

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, num_ranks: int, work: Callable[..., Any], arguments: Any) -> list[Any]:
        """Return what the function returns in each of the first processes."""
        if not self._processes:
            self._start()
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + LONGEST_S
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:num_ranks])}
        with tempfile.TemporaryDirectory() as folder:
            for pipe in waiting:
                pipe.send_bytes(pickle.dumps((num_ranks, folder, work, arguments)))
            while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
                for pipe in ready:
                    rank = waiting.pop(pipe)
                    try:
                        answers[rank] = pickle.loads(pipe.recv_bytes())
                    except (EOFError, ConnectionError):
                        answers[rank] = False, "the process has died"
        failed = [f"rank {rank}:\n{found}" for rank, (returned, found) in answers.items() if not returned]
        failed += [f"rank {rank}: no answer within {LONGEST_S:.0f} s" for rank in waiting.values()]
        if failed:
            self.close()
        assert not failed, "\n".join(failed)
        return [answers[rank][1] for rank in range(num_ranks)]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=_serve, args=(rank, theirs)))
            self._processes[-1].start()
            self._pipes.append(ours)
            theirs.close()  # so that the end of the process is the end of its pipe


_ranks = Ranks()
atexit.register(_ranks.close)


def run_ranks(work: Callable[..., Any], *arguments: Any, num_ranks: int = NUM_RANKS) -> list[Any]:
    """Return what `work(*arguments)`, a function of a module, returns in each process of a gloo job, by rank."""
    return _ranks.run(num_ranks, work, arguments)


@contextlib.contextmanager
def as_by_torchrun() -> Iterator[None]:
    """In a process of a job: set what torchrun sets, and let Accelerate forget the process before and after."""
    rank = str(distributed.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(NUM_RANKS), "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test"}
    warnings.simplefilter("ignore")
    forget_accelerate()
    try:
        yield
    finally:
        forget_accelerate()


def forget_accelerate() -> None:
    """Drop what Accelerate keeps for the process, such as mixed precision, where it was used; Trainer has one too."""
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def _serve(rank: int, pipe: Connection) -> None:
    """Run jobs until the pipe ends, which it does with the process of the tests too."""
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, ConnectionError):
            return
        try:
            answer = True, _run(rank, *pickle.loads(job))
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))


def _run(rank: int, num_ranks: int, folder: str, work: Callable[..., Any], arguments: Any) -> Any:
    """Run a job from what a fresh process has: directory, environment, random numbers, formats, warnings."""
    environment, directory = dict(os.environ), Path.cwd()
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    os.chdir(folder)  # journals of runs without a path of their own go there
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    random.seed(0)
    store = distributed.FileStore(str(Path(folder, "store")), num_ranks)
    options = {"rank": rank, "world_size": num_ranks, "timeout": timedelta(seconds=GROUP_TIMEOUT_S)}
    try:
        distributed.init_process_group("gloo", store=store, **options)
        # A group that is let go of first by its own thread, as PowerSGD's callbacks do, ends the process.
        _last_group[:] = [distributed.group.WORLD]
        with warnings.catch_warnings():
            return work(*arguments)
    except BaseException:
        _last_group.clear()  # so that the other process sees at once that nobody will answer it
        raise
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()  # what runs have left open ends before the next job
