"""One training run, plainly or with egeria: the loop, evaluations on held-out data, and the time it took."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.proving.policies import Policy
from benchmarks.proving.running.course import CPU, EPOCH, JUDGED, LOSS, WALL, Course
from benchmarks.proving.running.piece import Piece
from benchmarks.proving.running.stopwatch import Stopwatch
from benchmarks.workloads.workload import Training

Told = Callable[[int, float, dict[str, float]], object]
"""Told the epochs that ended, the depth that is frozen, and what was logged."""


def train(
    training: Training,
    policy: Policy,
    directory: Path,
    device: torch.device,
    told: Told = lambda *_: None,
    *,
    piece: Piece | None = None,
) -> bool:
    """Train once; everything that is to be known of it is in the journal afterwards.

    The watch goes from before `egeria.attach` until `close` has returned, and halts while the model
    is evaluated. `close` comes before the last evaluation, so that its time is part of the last reading.
    A run in pieces shows the sum over them: it attaches and loads states once a piece, and that counts.

    Args:
        training: new, from `Workload.build`.
        policy: who decides what freezes.
        directory: gets the journal.
        device: what the training is on.
        told: called after each epoch.
        piece: the part to train; None trains it whole.

    Returns:
        Whether the run is finished; where it is not, its checkpoint lies in the directory.
    """
    piece = piece or Piece(training, device, directory)
    if not piece.has_time():
        return False
    watch = Stopwatch(device)
    watch.go()
    course = Course(training, policy, directory)
    try:
        num_steps = len(training.loader)
        for epoch in range(piece.go_on(course, watch) + 1, training.num_epochs + 1):
            course.begin_epoch(epoch)
            for step, loss, is_end in train_epoch(training, course):
                frozen = course.frozen
                is_last = is_end and epoch == training.num_epochs
                if is_last:
                    course.end()
                watch.halt()
                at = epoch if is_end else epoch - 1 + step / num_steps
                values = {
                    **_evaluate(training, is_last=is_last),
                    EPOCH: at,
                    LOSS: loss,
                    WALL: watch.wall_s,
                    CPU: watch.cpu_s,
                }
                course.log((epoch - 1) * num_steps + step, values)
                if is_end:
                    told(epoch, frozen, values)
                else:
                    watch.go()
            if epoch < training.num_epochs:
                if not piece.end_epoch(epoch, course, watch):
                    return False
                watch.go()
        return True
    finally:
        course.close()


def train_epoch(training: Training, course: Course) -> Iterator[tuple[int, float, bool]]:
    """Train one epoch; halt where it is to be evaluated: steps of the epoch so far, their mean loss, is it the end."""
    network = training.model
    run, rival = course.run, course.rival
    halts = training.evaluation_steps
    total: Tensor | float = 0.0
    num_steps = 0
    network.train()
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
        elif rival:
            rival.end_step(loss.detach(), batch)
        total = total + loss.detach()  # its value is asked for in a halt: an accelerator is not kept waiting
        num_steps += 1
        if num_steps in halts:
            yield num_steps, float(total) / num_steps, False
            network.train()
    yield num_steps, float(total) / max(num_steps, 1), True


def _evaluate(training: Training, *, is_last: bool) -> dict[str, float]:
    training.model.eval()
    with torch.no_grad():
        values = {name: float(value) for name, value in training.evaluate(training.model).items()}
        if is_last and training.judge is not None:
            judged = training.judge(training.model)
            values |= {f"{JUDGED}{name}": float(value) for name, value in judged.items()}
    taken = {WALL, CPU, EPOCH, LOSS} & values.keys()
    if taken:
        raise ValueError(f"the names {sorted(taken)} are the bench's own; a workload's metrics must have others")
    return values
