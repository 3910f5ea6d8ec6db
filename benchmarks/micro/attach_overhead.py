"""What attaching costs when nothing ever freezes, over whole runs of three workloads, under the paper's policy.

    python -m benchmarks.micro.attach_overhead [WORKLOAD ...] [--data data] [--epochs N] [--controller process]
        [--record benchmarks/records/0018-overhead]

Two copies of a workload train in one process in turn, a few steps at a time, on the same batches: one plainly, one
attached with settings that never freeze, so that the first layer module is watched for as long as the policy looks.
A run is ten rounds; the ratio is that of the sums, since what comes only now and then counts too, and the spread is
that of rounds.
CPU time is that of this process and of the controller process; attaching and closing are printed apart and included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import egeria
from benchmarks.proving.journal import read_journal
from benchmarks.workloads.registry import WORKLOADS
from benchmarks.workloads.workload import Setting, Training

SUBJECTS = ("resnet8-cifar10", "bert-sst2", "bert-sst2-lora")
ROUNDS = 10
STEPS_A_TURN = 4


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What a watched run took beyond a plain one; seconds of CPU time."""

    workload: str
    total_steps: int
    plain_s: float
    watched_s: float
    """Of the training process, attaching and closing aside."""
    attach_s: float
    close_s: float
    controller_s: float
    """Of the controller process, its start included."""
    ratios: list[float]
    """Watched / plain of each round, in the training process."""
    readings: int
    refreshes: int
    intervals: list[int]
    """`n`, as it began and as it changed."""
    controller: str

    @property
    def share(self) -> float:
        """All of it, as a share of plain training."""
        return (self.watched_s + self.attach_s + self.close_s + self.controller_s) / self.plain_s - 1

    def in_words(self) -> str:
        """Return two lines."""
        low, _, high = statistics.quantiles(self.ratios, n=4) if len(self.ratios) > 1 else [self.ratios[0]] * 3
        fixed, every = self.attach_s + self.close_s, " then ".join(map(str, self.intervals))
        return (
            f"{self.workload}: CPU time {self.share:+.2%} of {self.plain_s:.1f} s; training process alone "
            f"{self.watched_s / self.plain_s - 1:+.2%} (rounds, quartiles {low - 1:+.2%} to {high - 1:+.2%})\n"
            f"  {self.total_steps} steps, attaching and closing {fixed:.2f} s ({fixed / self.plain_s:.2%}), controller "
            f"process {self.controller_s:.2f} s ({self.controller_s / self.plain_s:.2%}), {self.controller}, "
            f"{self.readings} readings, {self.refreshes} refreshes, an interval of {every} steps"
        )


def iterations(training: Training, run: egeria.Run | None) -> Iterator[None]:
    """Train, one iteration for each value asked for."""
    network = training.model
    while True:
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
            yield


def measure(
    name: str, make: Callable[[], Training], controller: str | None = None, total_steps: int | None = None
) -> Overhead:
    """Train a workload twice, in turn, and return what watching one of the two took.

    Args:
        name: of the workload.
        make: makes the workload, alike each time.
        controller: as `egeria.attach` takes it.
        total_steps: of the run; None for all that the workload has.
    """
    plain, watched = make(), make()
    total_steps = total_steps or len(plain.loader) * plain.num_epochs
    with tempfile.TemporaryDirectory() as directory:
        began_s = time.process_time()
        run = egeria.attach(
            watched.model,
            watched.optimizer,
            watched.loader,
            scheduler=watched.scheduler,
            total_steps=total_steps,
            policy="egeria",
            config={"freezing": {"tolerance_readings": 10**6}},
            directory=directory,
            controller=controller,
        )
        attach_s, sides = time.process_time() - began_s, (iterations(plain, None), iterations(watched, run))
        first, second = take_turns(sides, total_steps)
        began_s = time.process_time()
        run.close()
        close_s, journal = time.process_time() - began_s, read_journal(Path(directory))
    (closed,), (started,) = journal.of("run_closed"), journal.of("run_started")
    return Overhead(
        workload=name,
        total_steps=total_steps,
        plain_s=sum(first),
        watched_s=sum(second),
        attach_s=attach_s,
        close_s=close_s,
        controller_s=closed["controller_cpu_s"],
        ratios=[b / a for a, b in zip(first, second, strict=True)],
        readings=len(journal.of("plasticity")),
        refreshes=len(journal.of("reference")),
        intervals=[started["interval_steps"], *(event["after"] for event in journal.of("interval_changed"))],
        controller=journal.of("controller")[-1]["controller"],
    )


def take_turns(sides: tuple[Iterator[None], Iterator[None]], total_steps: int) -> tuple[list[float], list[float]]:
    """Return the CPU seconds of each round of both sides."""
    left, found = total_steps, ([], [])  # type: tuple[list[float], list[float]]
    for number in range(ROUNDS, 0, -1):
        steps = left // number
        left -= steps
        sums = [0.0, 0.0]
        for turn in range(-(-steps // STEPS_A_TURN)):
            length = min(STEPS_A_TURN, steps - turn * STEPS_A_TURN)
            for which in (0, 1) if turn % 2 else (1, 0):
                began_s = time.process_time()
                for _ in range(length):
                    next(sides[which])
                sums[which] += time.process_time() - began_s
        if steps:
            found[0].append(sums[0])
            found[1].append(sums[1])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(SUBJECTS)}; none takes all")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--tier", default="cpu")
    parser.add_argument("--epochs", type=int, help="length of the run; that of the workload without it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--controller", choices=["auto", "process", "inline"])
    parser.add_argument("--record", type=Path, help="folder that gets results.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workloads = {workload.name: workload for workload in WORKLOADS}
    setting = Setting(data=options.data, tier=options.tier, seed=0, device=torch.device("cpu"))

    def make(name: str) -> Training:
        training = workloads[name].build(setting)
        if options.epochs is None:
            return training
        # The schedule is that of a short run, as for whoever trains so briefly.
        steps = len(training.loader) * options.epochs
        return replace(training, num_epochs=options.epochs, scheduler=_shortened(training, steps))

    for name in options.workloads or SUBJECTS:
        result = measure(name, lambda name=name: make(name), options.controller)  # type: ignore[misc]
        print(result.in_words(), flush=True)
        if options.record:
            write(result, options.record / "results.json")


def write(result: Overhead, path: Path) -> None:
    """Put a result into a file of results, by workload."""
    known = json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    known[result.workload] = {**asdict(result), "share": result.share}
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf8")


def _shortened(training: Training, steps: int) -> Any:
    """Return the scheduler of a run with fewer steps: its rates, at the same shares of the run."""
    old, length = training.scheduler, len(training.loader) * training.num_epochs
    functions = getattr(old, "lr_lambdas", None)
    if functions is None:
        milestones = [round(at * steps / length) for at in sorted(old.milestones)]  # type: ignore[attr-defined]
        return torch.optim.lr_scheduler.MultiStepLR(training.optimizer, milestones, old.gamma)  # type: ignore[attr-defined]
    return torch.optim.lr_scheduler.LambdaLR(
        training.optimizer, [lambda step, own=own: own(round(step * length / steps)) for own in functions]
    )


if __name__ == "__main__":
    main()
