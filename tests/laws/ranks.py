"""Two processes of one gloo group, which run one job after the other: to start them takes seconds, a job does not."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
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
        answers = [self._answer(pipe) for pipe in self._pipes]
        failed = [f"rank {rank}: {found}" for rank, (returned, found) in enumerate(answers) if not returned]
        if failed:
            self.close()
        assert not failed, "\n".join(failed)
        return [found for _, found in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context, folder = multiprocessing.get_context("spawn"), tempfile.mkdtemp()
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, folder, theirs), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is that of its pipe
            self._processes.append(process)
            self._pipes.append(ours)

    @staticmethod
    def _answer(pipe: Connection) -> tuple[bool, Any]:
        try:
            return pipe.recv() if wait([pipe], 1.5 * TIMEOUT_S) else (False, "no answer in time")
        except (EOFError, ConnectionError):
            return False, "the process has died"


def _serve(rank: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(NUM_RANKS)
    os.chdir(folder)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(str(Path(folder, "store")), NUM_RANKS),
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    while True:
        try:
            work, arguments = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            pipe.send((True, work(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
