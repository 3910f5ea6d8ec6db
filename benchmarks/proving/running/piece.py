"""The part of a run that one process makes: from a checkpoint on, until the run is finished or the time is over."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.proving.running import checkpoint
from benchmarks.proving.running.checkpoint import Checkpoint
from benchmarks.proving.running.course import Course
from benchmarks.proving.running.limit import UNLIMITED, Limit
from benchmarks.proving.running.randomness import find_generators, read_chance, set_chance
from benchmarks.proving.running.stopwatch import Stopwatch
from benchmarks.workloads.workload import Training

MARGIN = 1.1
"""An epoch may take so much longer than those before it."""
LENGTHS = 3
"""Epochs that the next one is judged by; their median, so that one that stalled does not bar the way."""
REST = 10
"""Checkpoints have breaks between them of at least so many times what one takes: short epochs share one."""


class Piece:
    """Leaves checkpoints, goes on from one, and knows when to stop. Does nothing for a run that is made whole.

    Args:
        training: what is trained; the loader as nobody follows it yet.
        device: what it is trained on.
        directory: that of the run.
        limit: of the time; without one there is no checkpoint to go on from.
        identity: whose the checkpoints are, by `checkpoint.identify`.
        commit: that the run is made with now.
        begun: where to go on from; None begins with the first epoch.
        saved: told the epochs of each checkpoint.
    """

    def __init__(
        self,
        training: Training,
        device: torch.device,
        directory: Path,
        *,
        limit: Limit = UNLIMITED,
        identity: dict[str, Any] | None = None,
        commit: str = "",
        begun: Checkpoint | None = None,
        saved: Callable[[int], object] = lambda epoch: None,
    ) -> None:
        self._training = training
        self._device = device
        self._directory = directory
        self._limit = limit
        self._identity = identity or {}
        self._begun = begun
        self._tell_saved = saved
        self._generators = find_generators(training.loader)
        self._lengths_s: Sequence[float] = begun.lengths_s if begun else ()
        self._commits = list(dict.fromkeys((*(begun.commits if begun else ()), commit)))
        self._num_pieces = 1 + (begun.num_pieces if begun else 0)
        self._began_s = time.perf_counter()
        self._saved_s = -float("inf")
        self._saving_s = 0.0

    @property
    def num_done(self) -> int:
        """Epochs that were done before this piece."""
        return self._begun.epoch if self._begun else 0

    @property
    def made_with(self) -> dict[str, Any]:
        """What is to be known of a run that was made in pieces; nothing of one that was not."""
        if self._begun is None:
            return {}
        return {"commit": ", ".join(self._commits), "pieces": self._num_pieces}

    def has_time(self) -> bool:
        """Tell whether one more epoch, with its evaluation and its checkpoint, probably ends in time."""
        expected_s = statistics.median_high(self._lengths_s) if self._lengths_s else 0.0
        return self._limit.allows(MARGIN * expected_s + self._saving_s)

    def go_on(self, course: Course, watch: Stopwatch) -> int:
        """Bring a training that has just been built to its checkpoint; return the epochs that are done.

        Raises:
            RuntimeError: the checkpoint does not fit, whatever its identity says.
        """
        if self._begun is not None:
            try:
                self._load(self._begun, course)
            except Exception as error:
                raise RuntimeError(
                    f"the checkpoint in {self._directory} could not be loaded ({type(error).__name__}: {error}); "
                    f"make the run again with --again"
                ) from error
            watch.add(self._begun.wall_s, self._begun.cpu_s)
            self._begun = dataclasses.replace(self._begun, training={}, egeria=None)  # as large as the model
        self._began_s = time.perf_counter()
        return self.num_done

    def end_epoch(self, epoch: int, course: Course, watch: Stopwatch) -> bool:
        """Leave a checkpoint where that is asked for; tell whether another epoch may begin.

        Args:
            epoch: the one that ended, evaluated and logged.
            course: of the run.
            watch: halted.
        """
        if not self._limit.is_set:
            return True
        now_s = time.perf_counter()
        self._lengths_s = [*self._lengths_s, now_s - self._began_s][-LENGTHS:]
        is_due = now_s >= self._saved_s + REST * self._saving_s
        if is_due:
            self._save(epoch, course, watch)
        has_time = self.has_time()
        if not has_time and not is_due:
            self._save(epoch, course, watch)
        self._began_s = time.perf_counter()
        return has_time

    def _save(self, epoch: int, course: Course, watch: Stopwatch) -> None:
        began_s = time.perf_counter()
        checkpoint.save(self._describe(epoch, course, watch), self._directory)
        self._tell_saved(epoch)
        self._saved_s = time.perf_counter()
        self._saving_s = self._saved_s - began_s

    def _describe(self, epoch: int, course: Course, watch: Stopwatch) -> Checkpoint:
        training = self._training
        return Checkpoint(
            identity=self._identity,
            epoch=epoch,
            wall_s=watch.wall_s,
            cpu_s=watch.cpu_s,
            lengths_s=list(self._lengths_s),
            commits=self._commits,
            num_pieces=self._num_pieces,
            training={
                "model": training.model.state_dict(),
                "optimizer": training.optimizer.state_dict(),
                "scheduler": training.scheduler.state_dict(),
                "chance": read_chance(self._generators, self._device),
            },
            egeria=course.state_dict(),
        )

    def _load(self, begun: Checkpoint, course: Course) -> None:
        training, states = self._training, begun.training
        training.model.load_state_dict(states["model"])
        training.optimizer.load_state_dict(states["optimizer"])
        training.scheduler.load_state_dict(states["scheduler"])
        course.load_state_dict(begun.egeria, begun.epoch * len(training.loader))
        set_chance(states["chance"], self._generators, self._device)  # last: all before may have drawn
