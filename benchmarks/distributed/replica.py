"""One process of a measurement: python -m benchmarks.distributed.replica SUBJECT, with the environment of torchrun."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from examples.resnet import cifar_resnet
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rivals.layers import Layers
from egeria.distributed.ddp import rebuild_buckets

WARM_UP = 2
"""Iterations behind a freeze that are not timed: buckets are laid out anew in the first of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is trained, and on what."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    batch_size: int


def resnet56() -> Subject:
    """ResNet-56 on images of 32 x 32 pixels, 16 in a batch."""
    size = 16
    return Subject(
        build=lambda: cifar_resnet(56),
        batch=lambda: (torch.randn(size, 3, 32, 32), torch.randint(10, (size,))),
        loss=lambda network, batch: functional.cross_entropy(network(batch[0]), batch[1]),
        batch_size=size,
    )


def bert() -> Subject:
    """Six layers of BERT's width with a head for two classes, 4 sentences of 32 words in a batch."""
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 - takes seconds

    config = BertConfig(num_hidden_layers=6)
    return Subject(
        build=lambda: BertForSequenceClassification(config),
        batch=lambda: {"input_ids": torch.randint(1000, 30000, (4, 32)), "labels": torch.randint(2, (4,))},
        loss=lambda network, batch: network(**batch).loss,
        batch_size=4,
    )


SUBJECTS = {"resnet56": resnet56, "bert": bert}


class Replica:
    """A model in training under `DistributedDataParallel`, whose front is frozen by hand.

    Args:
        subject: what is trained.
        sizes: takes the bytes of each bucket that is reduced; None reduces as ever.
    """

    def __init__(self, subject: Subject, sizes: list[int] | None = None) -> None:
        torch.manual_seed(0)
        self._subject = subject
        self._network = DistributedDataParallel(subject.build())
        self.model = self._network.module
        self._layers = Layers(self.model)
        self.modules = self._layers.modules
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if sizes is not None:
            self._network.register_comm_hook(sizes, _count)

    @property
    def trainable_bytes(self) -> int:
        """Of the parameters that need a gradient now."""
        return sum(entry.numel() * entry.element_size() for entry in self.model.parameters() if entry.requires_grad)

    def freeze_to(self, depth: int) -> float:
        """Freeze so many front modules and no others; return the seconds that laying out the buckets took."""
        self._layers.freeze_to(depth)
        began = time.perf_counter()
        rebuild_buckets(self._network)
        return time.perf_counter() - began

    def iterate(self, count: int) -> tuple[float, float]:
        """Train some iterations; return wall-clock and CPU seconds, all ranks having begun together."""
        self.model.train()
        distributed.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            self._subject.loss(self._network, self._subject.batch()).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return time.perf_counter() - began, time.process_time() - began_cpu


def _count(sizes, bucket):  # without types: torch accepts no others than its own, and those not as text
    sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
    return default_hooks.allreduce_hook(None, bucket)


def count_bytes(subject: Subject, depths: list[int]) -> list[dict[str, Any]]:
    """Return for each depth the bytes that an iteration reduces, and those that train."""
    sizes: list[int] = []
    replica, found = Replica(subject, sizes), []
    for depth in depths:
        replica.freeze_to(depth)
        replica.iterate(WARM_UP)
        sizes.clear()
        replica.iterate(1)
        names = [module.name for module in replica.modules[:depth]]
        found.append({"depth": depth, "reduced": sum(sizes), "trainable": replica.trainable_bytes, "frozen": names})
    return found


def measure(subject: Subject, depths: list[int], rounds: int, iterations: int) -> list[dict[str, Any]]:
    """Return for each round and depth, taken in turn, what an iteration and laying out the buckets took."""
    replica, found = Replica(subject), []
    for index in range(rounds):
        for depth in depths if index % 2 else reversed(depths):
            rewrap_s = replica.freeze_to(depth)
            replica.iterate(WARM_UP)
            wall_s, cpu_s = replica.iterate(iterations)
            found.append(
                {
                    "round": index,
                    "depth": depth,
                    "wall_s": wall_s / iterations,
                    "cpu_s": cpu_s / iterations,
                    "rewrap_s": rewrap_s,
                    "batch_size": subject.batch_size,
                }
            )
    return found


def main() -> None:
    """Measure with the other ranks; the first prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--depths", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--bytes", action="store_true", help="count bytes instead of taking times")
    options = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    depths = [int(depth) for depth in options.depths.split(",")]
    subject = SUBJECTS[options.subject]()
    if options.bytes:
        found = count_bytes(subject, depths)
    else:
        found = measure(subject, depths, options.rounds, options.iterations)
    if distributed.get_rank() == 0:
        print(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
