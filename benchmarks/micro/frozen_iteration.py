"""How long an iteration takes with the first stage frozen, against an unfrozen one.

    python -m benchmarks.micro.frozen_iteration [--model resnet20] [--rounds 15] [--threads 1]

Both models train in one process, in turn, on the same batch; the frozen one is frozen by the
library's own freezer. No activation cache: the forward pass of the frozen stage still runs.
"""

from __future__ import annotations

import argparse

import torch
from examples.resnet import cifar_resnet
from torch.nn import functional

from benchmarks.micro.interleaved import Comparison, compare
from benchmarks.rivals.layers import Layers


class Trainer:
    """One residual net, its optimizer and one batch."""

    def __init__(self, depth: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = cifar_resnet(depth).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        self.images = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 10, (batch,))

    def step(self) -> None:
        """One iteration in bf16."""
        self.model.train()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(depth: int = 20, rounds: int = 15, batch: int = 128, frozen: int = 1) -> Comparison:
    """Compare an unfrozen iteration (first) with one whose `frozen` front modules are frozen (second)."""
    plain, other = Trainer(depth, batch), Trainer(depth, batch)
    plain.step()
    other.step()
    Layers(other.model).freeze_to(frozen)
    return compare(plain.step, other.step, rounds=rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["resnet8", "resnet20", "resnet56"], default="resnet20")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    depth = int(options.model.removeprefix("resnet"))
    for frozen in (1, 2):
        result = measure(depth, options.rounds, frozen=frozen)
        low, high = result.spread()
        print(
            f"{options.model}, {frozen} front module(s) frozen: {result.cpu_ratio():.1%} of the CPU time "
            f"(quartiles {low:.1%} to {high:.1%}), {result.wall_ratio():.1%} of the wall-clock time"
        )


if __name__ == "__main__":
    main()
