"""What attaching costs when nothing ever freezes, with default settings.

    python -m benchmarks.micro.attach_overhead [--model resnet20] [--rounds 20] [--threads 1] [--controller process]

Two models train in one process, in turn, a whole evaluation interval at a time: one plainly, one
attached with `freezing.enabled = false`, past bootstrapping, so that every interval holds one
evaluation, and one in ten a refresh of the reference. The sums are compared, over whole tens of intervals.
CPU time is that of the training process; what a controller process takes on another core is told beside it.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch.nn import functional

import egeria
from benchmarks.micro.frozen_iteration import Trainer
from benchmarks.micro.interleaved import Comparison, compare
from egeria.events import ControllerChosen, IntervalChanged, PlasticityRead, ReadingDropped, RunClosed, RungTaken


class WatchedTrainer(Trainer):
    """The same, with egeria attached; it watches and never freezes."""

    def __init__(self, depth: int, batch: int, total_steps: int, directory: str, controller: str) -> None:
        super().__init__(depth, batch)
        self.run = egeria.attach(
            self.model,
            self.optimizer,
            total_steps=total_steps,
            config={"freezing": {"enabled": False}},
            directory=directory,
            controller=controller,
        )

    def step(self) -> None:
        """One iteration in bf16, and `run.step`."""
        self.run.model.train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(self.run.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.step(loss)


def measure(
    depth: int = 20, rounds: int = 20, controller: str = "auto", batch: int = 128, total_steps: int = 4680
) -> tuple[Comparison, str]:
    """Compare intervals of plain (first) and of watched training (second); return how it was watched too."""
    with tempfile.TemporaryDirectory() as directory:
        plain, watched = Trainer(depth, batch), WatchedTrainer(depth, batch, total_steps, directory, controller)
        started = egeria.read_journal(directory).events[0]
        interval = started.to_dict()["interval_steps"]
        while watched.run.stage == "bootstrapping":
            watched.step()

        def several(trainer: Trainer) -> None:
            for _ in range(interval):
                trainer.step()

        result = compare(lambda: several(plain), lambda: several(watched), rounds=rounds, warmup=1)
        watched.run.close()
        return result, facts(egeria.read_journal(directory), interval)


def facts(journal: egeria.Journal, interval: int) -> str:
    """Return what the journal says of how the run was watched."""
    chosen, closed = journal.first(ControllerChosen), journal.first(RunClosed)
    formats = " > ".join(rung.after for rung in journal.of(RungTaken))
    changes = [f"then every {change.after}" for change in journal.of(IntervalChanged)]
    return (
        f"{chosen.controller} controller, reference {formats}, evaluated every {' '.join([str(interval), *changes])} "
        f"steps, {len(journal.of(PlasticityRead))} readings, {len(journal.of(ReadingDropped))} dropped, "
        f"{closed.controller_cpu_s:.1f} s of CPU in the controller process"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["resnet8", "resnet20", "resnet56"], default="resnet20")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--controller", choices=["auto", "process", "inline"], default="auto")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result, how = measure(int(options.model.removeprefix("resnet")), options.rounds, options.controller)
    low, high = result.spread()
    cpu, wall = result.total_ratio()
    print(
        f"{options.model}: CPU time {cpu - 1:+.2%} (single intervals, quartiles {low - 1:+.2%} to {high - 1:+.2%}), "
        f"wall-clock time {wall - 1:+.2%}\n  {how}"
    )


if __name__ == "__main__":
    main()
