"""What running the frozen prefix as inference saves where its outputs cannot be cached.

    python -m benchmarks.micro.fast_prefix [--models resnet20,resnet20-nchw] [--rounds 15] [--threads 1] [--compile]

A whole iteration (forward, backward, optimizer step) with front modules frozen, plainly (first) and
with `FastPrefix` (second), in one process, in turn, on the same batch; and the forward pass of the
prefix alone. The distances tell how far both are from float32, in units in the last place of
bfloat16; they are what the tolerance of `FastPrefix` goes by.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.micro.interleaved import Comparison, compare
from egeria.layers.batch import Autocast, Batch
from egeria.layers.freezer import Freezer
from egeria.layers.inference.fast_prefix import FastPrefix
from egeria.layers.inference.probe import Probe
from egeria.layers.parse import parse_modules
from egeria.layers.taps import capture
from egeria.testing.convnets import cifar_resnet, mobilenet_v2

_ULP = 2**-7


@dataclass(frozen=True)
class Subject:
    """A model and what it is trained on."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor


class Trainer:
    """One model with frozen front modules, its optimizer and one batch."""

    def __init__(self, subject: Subject, frozen: int, autocast: bool) -> None:
        self.model, self.labels = subject.model.train(), subject.labels
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        modules = parse_modules(self.model)
        setting = Autocast(device_type="cpu", enabled=autocast, dtype=torch.bfloat16)
        self.batch = Batch(args=(subject.inputs,), kwargs={}, autocast=setting)
        self.step()
        Freezer(self.model, modules).freeze_to(frozen)
        self.roots = [name for module in modules[:frozen] for name in module.submodules]
        self.tap = modules[frozen - 1].tap
        self.fast: FastPrefix | None = None

    def step(self) -> None:
        """One iteration."""
        self.model.train()
        with self.batch.autocast.context():
            loss = functional.cross_entropy(self.model(*self.batch.args), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run_prefix(self) -> None:
        """The forward pass up to the boundary."""
        capture(self.model, self.tap, self.batch)

    def build(self, compile: bool) -> FastPrefix:
        """Make the fast prefix."""
        fast = FastPrefix.build(self.model, self.roots, self.batch, compile=compile)
        if fast is None:
            raise SystemExit("There is nothing to gain on this model.")
        return fast


def with_fast(fast: FastPrefix, action: Callable[[], None]) -> Callable[[], None]:
    """Return the action with the fast prefix around it."""

    def run() -> None:
        with fast.running():
            action()

    return run


def distances(trainer: Trainer, fast: FastPrefix) -> tuple[float, float, float]:
    """Return how far fast is from plain, and plain and fast from float32, in units of bfloat16."""
    probe = Probe(trainer.model, trainer.roots, trainer.batch)
    outcomes = []
    for which, forwards in ((probe.in_full_precision(), {}), (probe, {}), (probe, fast.forwards)):
        with which.run(forwards) as outcome:
            fast.settle()
        outcomes.append(outcome.in_float32())
    folded = [name for name, root in probe.roots.items() if root in fast.folded]
    exact, plain, quick = outcomes
    apart, of_plain, of_quick = plain.error(quick, folded), exact.error(plain, folded), exact.error(quick, folded)
    return apart / _ULP, of_plain / _ULP, of_quick / _ULP


def _images(model: nn.Module, rows: int, side: int, layout: torch.memory_format) -> Subject:
    model.to(memory_format=layout)  # type: ignore[call-overload]
    with torch.no_grad():
        for _ in range(3):
            model.train()(torch.randn(32, 3, side, side) + torch.randn(1, 3, 1, 1))
    return Subject(model, torch.randn(rows, 3, side, side).contiguous(memory_format=layout), torch.zeros(rows).long())


class _Reader(nn.Module):
    """Transformer layers of the size of BERT base, called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, activation="gelu") for _ in range(6)]
        )
        self.output = nn.Linear(768, 2)

    def forward(self, x: Tensor) -> Any:
        """Return scores [B, 2] of vectors [B, T, 768]."""
        for layer in self.layers:
            x = layer(x)
        return self.output(x.mean(1))


def _report(what: str, result: Comparison) -> None:
    low, high = result.spread()
    print(f"  {what}: {result.cpu_ratio():.1%} of the CPU time (quartiles {low:.1%} to {high:.1%})", flush=True)


def measure(name: str, frozen: int, autocast: bool, rounds: int, compile: bool = False) -> None:
    """Measure one model frozen to one depth, and print."""
    torch.manual_seed(0)
    first = Trainer(SUBJECTS[name](), frozen, autocast)
    torch.manual_seed(0)
    second = Trainer(SUBJECTS[name](), frozen, autocast)
    fast = second.build(compile)
    print(
        f"{name}, {'bf16' if autocast else 'fp32'}, {frozen} front module(s) frozen: {fast.num_folded} norms folded, "
        f"{fast.num_cast} casts, {'now channels_last, ' if fast.is_channels_last else ''}"
        f"{'compiled, ' if fast.is_compiled else ''}error {fast.error:.1e}"
    )
    _report("iteration", compare(first.step, with_fast(fast, second.step), rounds=rounds))
    fast.settle()
    with torch.no_grad():
        _report("prefix   ", compare(first.run_prefix, with_fast(fast, second.run_prefix), rounds=rounds))
    if autocast:
        apart, plain, quick = distances(second, fast)
        print(f"  bf16 units: fast from plain {apart:.1f}, plain from float32 {plain:.1f}, fast {quick:.1f}")


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "resnet20": lambda: _images(cifar_resnet(20), 128, 32, torch.channels_last),
    "resnet20-nchw": lambda: _images(cifar_resnet(20), 128, 32, torch.contiguous_format),
    "mobilenet_v2-nchw": lambda: _images(mobilenet_v2(), 32, 64, torch.contiguous_format),
    "bert-layers": lambda: Subject(_Reader(), torch.randn(8, 32, 768), torch.zeros(8).long()),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet20,resnet20-nchw")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for name in options.models.split(","):
        for autocast in (True, False):
            for frozen in (1, 2):
                measure(name, frozen, autocast, options.rounds, options.compile)


if __name__ == "__main__":
    main()
