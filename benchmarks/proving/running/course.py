"""A run that goes on, with egeria or without, and its journal, which both have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import egeria
from benchmarks.proving.policies import Policy
from benchmarks.proving.running.rivals import Resting
from benchmarks.workloads.workload import Training
from egeria.events import MetricLogged, Resumed, RunClosed, RunStarted
from egeria.journal import Recorder
from egeria.policy import BOOTSTRAPPING

WALL, CPU, EPOCH, LOSS = "train_wall_s", "train_cpu_s", "epoch", "train_loss"
"""What is logged beside the workload's metrics: seconds of training so far, the epoch, its mean training loss."""
JUDGED = "judge_"
"""Begins the names of what `Training.judge` found, logged with the last evaluation."""


class Course:
    """Tells the journal of a run; egeria does, where it is watched.

    Args:
        training: what is trained.
        policy: who decides what freezes.
        directory: gets the journal, behind what lies there.
    """

    def __init__(self, training: Training, policy: Policy, directory: Path) -> None:
        self._directory = directory
        self._total_steps = training.num_epochs * len(training.loader)
        self._journal: Recorder | None = None
        self.run: egeria.Run | None = None
        self._resting = Resting(training.model, policy) if policy.rests else None
        if not policy.is_watched:
            self._journal = Recorder(directory)
            self._journal.write(_plain_start(training, policy, self._total_steps))
            return
        self.run = egeria.attach(
            training.model,
            training.optimizer,
            training.loader,
            scheduler=training.scheduler,
            total_steps=self._total_steps,
            directory=directory,
            **policy.attach_arguments(),
        )

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen."""
        return self.run.frozen if self.run else 0

    def begin_epoch(self, epoch: int) -> None:
        """Get ready for an epoch, counted from 1."""
        if self._resting:
            self._resting.begin_epoch(epoch)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of egeria's run; None of a plain one."""
        return self.run.state_dict() if self.run else None

    def load_state_dict(self, state: dict[str, Any] | None, step: int) -> None:
        """Go on from a saved state; load model and optimizer first.

        Args:
            state: that of egeria's run; None of a plain one, which egeria's may branch off.
            step: how many steps were done.
        """
        if self.run:
            self.run.load_state_dict(state or _counted(self.run.state_dict(), step))
        elif self._journal:
            self._journal.write(Resumed(step=step, frozen=0, stage=BOOTSTRAPPING))

    def end(self) -> None:
        """End what egeria does; what is logged after this goes behind its last line."""
        if self.run:
            self.run.close()
            self._journal, self.run = Recorder(self._directory), None
        elif self._journal:
            self._journal.write(RunClosed(step=self._total_steps, frozen=0, overhead_wall_s=0.0, overhead_cpu_s=0.0))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Tell what was measured."""
        if self.run:
            self.run.log(**values)
        elif self._journal:
            self._journal.write(MetricLogged(step=step, values=values))

    def close(self) -> None:
        """Leave the model as it was found, and the journal."""
        if self.run:
            self.run.close()
        if self._resting:
            self._resting.end()
        if self._journal:
            self._journal.close()


def _counted(state: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the state of a new run as if it had watched so many steps, in which nothing was frozen."""
    interval = state["interval_steps"]
    return {**state, "step": step, "evaluation": step // interval, "interval_began": step - step % interval}


def _plain_start(training: Training, policy: Policy, total_steps: int) -> RunStarted:
    """Return how the journal begins of a run that egeria has no part in."""
    return RunStarted(
        step=0,
        config={},
        modules=[],
        trainable=[],
        deepest_freeze=0,
        rule="none",
        total_steps=total_steps,
        interval_steps=0,
        interval_reason=f"training under {policy.name!r}: nothing is judged",
        environment={
            "model": type(training.model).__name__,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "steps_per_epoch": len(training.loader),
        },
    )
