"""A shorter plain training: what anyone gets for less time without freezing anything."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, cast

from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from benchmarks.proving.policies import Policy
from benchmarks.workloads.workload import Training


def shortened(training: Training, policy: Policy) -> Training:
    """Return the training as a policy shortens it: 'short' to a `share` of its steps, others not at all.

    Each epoch ends after that share of its batches, drawn in the same order, and the whole schedule of the learning
    rate is gone through in the steps that are left.
    """
    if not policy.shortens:
        return training
    loader, num_full = training.loader, len(training.loader)
    num_kept = max(1, round(policy.settings["policy"]["share"] * num_full))
    fewer: Any = FewerBatches(cast(Any, loader.batch_sampler), num_kept)
    return dataclasses.replace(
        training,
        loader=DataLoader(
            loader.dataset,
            batch_sampler=fewer,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
        ),
        scheduler=cast(LRScheduler, FasterScheduler(training.scheduler, num_full, num_kept)),
    )


class FewerBatches(Sampler[list[int]]):
    """The first batches of each epoch."""

    def __init__(self, batch_sampler: Sampler[list[int]], count: int) -> None:
        self.batch_sampler, self._count = batch_sampler, count

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batch_sampler), self._count)

    def __len__(self) -> int:
        return self._count


class FasterScheduler:
    """Steps another scheduler `num_full` times in `num_kept` steps of its own, spread evenly."""

    def __init__(self, scheduler: LRScheduler, num_full: int, num_kept: int) -> None:
        self._scheduler, self._num_full, self._num_kept = scheduler, num_full, num_kept
        self._done = 0

    def step(self) -> None:
        """Go on with the schedule after an optimizer step."""
        before, self._done = self._done, self._done + 1
        for _ in range(self._done * self._num_full // self._num_kept - before * self._num_full // self._num_kept):
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return where it is."""
        return {"done": self._done, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._done = state["done"]
        self._scheduler.load_state_dict(state["scheduler"])
