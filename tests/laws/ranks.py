"""Two processes of one gloo group, which run one job after the other: to start them takes seconds, a job does not."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

NUM_RANKS = 2
TIMEOUT_S = 60.0


class Ranks:
    """The pair of processes. After a job that failed they are started anew, since one may wait for the other."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what `work(*arguments)`, a function of a module, returns in each process."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((work, arguments))
        answers = [pipe.recv() if pipe.poll(1.5 * TIMEOUT_S) else (False, "no answer") for pipe in self._pipes]
        if failed := [found for returned, found in answers if not returned]:
            self.close()
            raise AssertionError("\n".join(failed))
        return [found for _, found in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context, store = multiprocessing.get_context("spawn"), str(Path(tempfile.mkdtemp(), "store"))
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=_serve, args=(rank, store, theirs), daemon=True))
            self._processes[-1].start()
            theirs.close()  # so that the end of the process is the end of its pipe
            self._pipes.append(ours)


def _serve(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(NUM_RANKS)
    options = {"rank": rank, "world_size": NUM_RANKS, "timeout": timedelta(seconds=TIMEOUT_S)}
    distributed.init_process_group("gloo", store=distributed.FileStore(store, NUM_RANKS), **options)
    while True:
        try:
            work, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, work(*arguments)))
        except BaseException:
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
