"""Running a function in the processes of a job, as `torchrun` would start them."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

TIMEOUT_S = 60.0
LONGEST_S = 240.0


def run_ranks(work: Callable[..., Any], *arguments: Any, num_ranks: int = 2, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Return what `work(*arguments)` returns in each process of a gloo job, by rank.

    Args:
        work: a function at the top of a module.
        arguments: for each process the same.
        num_ranks: processes.
        timeout_s: of the process group.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_work, args=(rank, num_ranks, folder, timeout_s, work, arguments))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + LONGEST_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        answers = [_answer(Path(folder, str(rank))) for rank in range(num_ranks)]
    failed = [f"rank {rank}:\n{answer}" for rank, (returned, answer) in enumerate(answers) if not returned]
    assert not failed, "\n".join(failed)
    return [answer for _, answer in answers]


def run_cases(work: Callable[..., Any], cases: Sequence[Any], **options: Any) -> dict[Any, list[Any]]:
    """Return for each case what `work(case)` returns in each process; all in the same processes, which take seconds."""
    answers = run_ranks(_work_through, work, list(cases), **options)
    return {case: [found[index] for found in answers] for index, case in enumerate(cases)}


def _work_through(work: Callable[..., Any], cases: list[Any]) -> list[Any]:
    return [work(case) for case in cases]


def _answer(path: Path) -> tuple[bool, Any]:
    return pickle.loads(path.read_bytes()) if path.exists() else (False, "it ended without an answer")


def _work(rank: int, num_ranks: int, folder: str, timeout_s: float, work: Any, arguments: Any) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)  # journals of runs without a path of their own go there
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(str(Path(folder, "store")), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        answer = True, work(*arguments)
    except BaseException:
        answer = False, traceback.format_exc()
    Path(folder, str(rank)).write_bytes(pickle.dumps(answer))
    distributed.destroy_process_group()
