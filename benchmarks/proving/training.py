"""One training run, plainly or with egeria: the loop, an evaluation after each epoch, and the time it took."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import egeria
from benchmarks.proving.policies import Policy
from benchmarks.proving.stopwatch import Stopwatch
from benchmarks.workloads.workload import Training
from egeria.events import MetricLogged, RunClosed, RunStarted
from egeria.journal import JournalWriter

WALL, CPU, EPOCH, LOSS = "train_wall_s", "train_cpu_s", "epoch", "train_loss"
"""What is logged beside the workload's metrics: seconds of training so far, the epoch, its mean training loss."""

Told = Callable[[int, float, dict[str, float]], object]
"""Told the epochs that ended, the depth that is frozen, and what was logged."""


def train(
    training: Training, policy: Policy, directory: Path, device: torch.device, told: Told = lambda *_: None
) -> None:
    """Train once; everything that is to be known of it is in the journal afterwards.

    The watch goes from before `egeria.attach` until `close` has returned, and halts while the model
    is evaluated. `close` comes before the last evaluation, so that its time is part of the last reading.

    Args:
        training: new, from `Workload.build`.
        policy: who decides what freezes.
        directory: gets the journal.
        device: what the training is on.
        told: called after each epoch.
    """
    watch = Stopwatch(device)
    watch.go()
    course = _Course(training, policy, directory)
    try:
        for epoch in range(1, training.num_epochs + 1):
            loss = _train_epoch(training, course.run)
            frozen = course.frozen
            if epoch == training.num_epochs:
                course.end()
            watch.halt()
            values = {**_evaluate(training), EPOCH: epoch, LOSS: loss, WALL: watch.wall_s, CPU: watch.cpu_s}
            course.log(epoch * len(training.loader), values)
            told(epoch, frozen, values)
            if epoch < training.num_epochs:
                watch.go()
    finally:
        course.close()


class _Course:
    """A run that goes on, with egeria or without, and its journal, which both have."""

    def __init__(self, training: Training, policy: Policy, directory: Path) -> None:
        self._directory = directory
        self._total_steps = training.num_epochs * len(training.loader)
        self._journal: JournalWriter | None = None
        self.run: egeria.Run | None = None
        if policy.is_plain:
            self._journal = _writer(directory)
            self._journal.write(_plain_start(training, self._total_steps))
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
        return self.run.frozen if self.run else 0

    def end(self) -> None:
        """End what egeria does; what is logged after this goes behind its last line."""
        if self.run:
            self.run.close()
            self._journal, self.run = _writer(self._directory), None
        elif self._journal:
            self._journal.write(RunClosed(step=self._total_steps, frozen=0, overhead_wall_s=0.0, overhead_cpu_s=0.0))

    def log(self, step: int, values: dict[str, float]) -> None:
        if self.run:
            self.run.log(**values)
        elif self._journal:
            self._journal.write(MetricLogged(step=step, values=values))

    def close(self) -> None:
        if self.run:
            self.run.close()
        if self._journal:
            self._journal.close()


def _train_epoch(training: Training, run: egeria.Run | None) -> float:
    """Train one epoch; return the mean loss."""
    network: Any = run.model if run else training.model
    network.train()
    total: Tensor | float = 0.0
    num_steps = 0
    for batch in training.loader:
        loss = training.loss(network, batch)
        loss.backward()
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.clip_norm)
        training.optimizer.step()
        training.scheduler.step()
        training.optimizer.zero_grad()
        if run:
            run.step(loss)
        total = total + loss.detach()  # its value is asked for once an epoch: an accelerator is not kept waiting
        num_steps += 1
    return float(total) / max(num_steps, 1)


def _evaluate(training: Training) -> dict[str, float]:
    training.model.eval()
    with torch.no_grad():
        values = {name: float(value) for name, value in training.evaluate(training.model).items()}
    taken = {WALL, CPU, EPOCH, LOSS} & values.keys()
    if taken:
        raise ValueError(f"the names {sorted(taken)} are the bench's own; a workload's metrics must have others")
    return values


def _plain_start(training: Training, total_steps: int) -> RunStarted:
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
        interval_reason="plain training: nothing is judged",
        environment={
            "model": type(training.model).__name__,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "steps_per_epoch": len(training.loader),
        },
    )


def _writer(directory: Path) -> JournalWriter:
    return JournalWriter(directory, on_failure=lambda message: warnings.warn(message, stacklevel=2))
