"""A run that goes on, with egeria or a rival, and its journal, which both have."""

from pathlib import Path
from typing import Any

import torch

import egeria
from benchmarks.proving.journal import JournalWriter
from benchmarks.proving.policies import Policy
from benchmarks.rivals import Rival, make_rival
from benchmarks.workloads.workload import Training

WALL, CPU, EPOCH, LOSS = "train_wall_s", "train_cpu_s", "epoch", "train_loss"
"""What is logged beside the workload's metrics: seconds of training so far, the epoch, its mean training loss."""
JUDGED = "judge_"
"""Begins the names of what `Training.judge` found, logged with the last evaluation."""


class Course:
    """Writes the journal of a run; where egeria is attached, egeria does.

    Args:
        training: what is trained.
        policy: decides what is frozen.
        directory: gets the journal, behind what lies there.
    """

    def __init__(self, training: Training, policy: Policy, directory: Path) -> None:
        self._directory = directory
        self._total_steps = training.num_epochs * len(training.loader)
        self._journal: JournalWriter | None = None
        self.run: egeria.Run | None = None
        self.rival: Rival | None = None
        self._has_ended = False
        if not policy.is_watched:
            self._journal = JournalWriter(directory)
            self.rival = make_rival(training, policy.name, policy.settings, self._journal)
            self._journal.write("run_started", 0, **_describe(training, policy, self.rival))
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
        part = self.run or self.rival
        return (part.frozen if isinstance(part, egeria.Run) else part.depth) if part else 0

    def begin_epoch(self, epoch: int) -> None:
        """Get ready for an epoch, counted from 1."""
        if self.rival:
            self.rival.begin_epoch(epoch)

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of egeria's run, or of the rival."""
        part = self.run or self.rival
        return part.state_dict() if part else None

    def load_state_dict(self, state: dict[str, Any] | None, step: int) -> None:
        """Go on from a saved state; load model and optimizer first.

        Args:
            state: from `state_dict`.
            step: how many steps were done.
        """
        part = self.run or self.rival
        if part and state is not None:
            part.load_state_dict(state)
        if self._journal:
            self._journal.write("resumed", step, frozen=self.frozen, stage="bootstrapping")

    def end(self) -> None:
        """End what egeria does; what is logged after this goes behind its last line."""
        if self.run:
            self.run.close()
            self._journal, self.run = JournalWriter(self._directory), None
        elif self._journal:
            self._has_ended = True
            cost = {"overhead_wall_s": 0.0, "overhead_cpu_s": 0.0}
            self._journal.write("run_closed", self._total_steps, frozen=self.frozen, **cost)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write down what was measured."""
        if self.run:
            self.run.log(**values)
        elif self._journal:
            self._journal.write("metric", step, values=values)

    def close(self) -> None:
        """Leave the model as it was found, and the journal, where a rival's shares of the compute go now.

        That takes one more batch; nobody takes its time.
        """
        if self.run:
            self.run.close()
        if self.rival and self._journal and self._has_ended and (shares := self.rival.forward_shares()):
            self._journal.write("compute_profiled", self._total_steps, forward_shares=shares)
        if self.rival:
            self.rival.close()
        if self._journal:
            self._journal.close()


def _describe(training: Training, policy: Policy, rival: Rival) -> dict[str, Any]:
    """Return how the journal of a rival begins."""
    return {
        "config": {},
        **rival.describe(),
        "rule": "none",
        "total_steps": training.num_epochs * len(training.loader),
        "interval_steps": 0,
        "environment": {
            "model": type(training.model).__name__,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "steps_per_epoch": len(training.loader),
        },
    }
