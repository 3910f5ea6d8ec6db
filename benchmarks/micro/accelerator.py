"""What frozen layer modules save on an accelerator, at the size of real models, beside what advice foretells.

    python -m benchmarks.micro.accelerator [MODEL ...] [--device cuda] [--rounds 6] [--steps 10] [--small]
        [--record benchmarks/records/NAME]

Times only, on made-up batches: what is learnt does not matter to them. Advice is asked for first. Then, for a quarter,
half and three quarters of the layer modules, two copies train in one process in turn, a few steps at a time: one
plainly, one attached with these modules frozen by a plan from the start. A turn ends when the accelerator
has done all of it. The saving is 1 less the ratio of the sums, its spread that of rounds. The cache is off, but in one
more row for the half: the same few batches come again and again, so that there it may have all of them.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import egeria
from benchmarks.micro.interleaved import compare
from benchmarks.proving.running.recipe import describe_circumstances

Batch = dict[str, Tensor]
SHARES = (0.25, 0.5, 0.75)
WARMUP = 3
"""Turns that are not counted: the first of a shape choose kernels."""
NUM_BATCHES = 4
TOTAL_STEPS = 4000
"""That the run is told: the end is far."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model as it is trained; `make` is called with whether it shall be small."""

    make: Callable[[bool], nn.Module]
    batch: Callable[[bool], Batch]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model with so many of its layer modules frozen; savings are shares of the time of its iterations."""

    model: str
    frozen: int
    num_modules: int
    cached: bool
    foretold: float | None
    measured: float
    quartiles: tuple[float, float]
    plain_ms: float
    """Of an iteration, wall-clock."""
    plain_peak_bytes: int | None
    """Most memory in use during a turn less what is in use between turns: activations, and gradients as they come."""
    frozen_peak_bytes: int | None


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-5)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def _bert(small: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 (slow to import)

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128} if small else {}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=12, **sizes))


def _sentences(small: bool) -> Batch:
    count, length = (4, 16) if small else (32, 128)
    return {"input_ids": torch.randint(1000, 30_000, (count, length)), "labels": torch.randint(0, 2, (count,))}


def _gpt2(small: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    sizes = {"n_embd": 64, "n_head": 2} if small else {}
    return GPT2LMHeadModel(GPT2Config(**sizes))


def _texts(small: bool) -> Batch:
    tokens = torch.randint(0, 50_000, (2, 32) if small else (8, 512))
    return {"input_ids": tokens, "labels": tokens}


def _vit(small: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128} if small else {}
    return ViTForImageClassification(ViTConfig(num_labels=1000, **sizes))


def _resnet50(small: bool) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification  # noqa: PLC0415

    model: nn.Module = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _images(small: bool) -> Batch:
    count = 2 if small else 64
    return {"pixel_values": torch.randn(count, 3, 224, 224), "labels": torch.randint(0, 1000, (count,))}


SUBJECTS = {
    "bert-base": Subject(make=_bert, batch=_sentences, optimizer=_adamw),
    "gpt2": Subject(make=_gpt2, batch=_texts, optimizer=_adamw),
    "vit-base": Subject(make=_vit, batch=_images, optimizer=_adamw),
    "resnet50": Subject(make=_resnet50, batch=_images, optimizer=_sgd),
}


class Trainer:
    """A model, its optimizer, and batches that lie on its device."""

    def __init__(self, subject: Subject, device: torch.device, small: bool) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = subject.make(small).to(device)
        self.optimizer = subject.optimizer(self.model)
        drawn = [subject.batch(small) for _ in range(NUM_BATCHES)]
        self.batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in drawn]
        self.run: egeria.Run | None = None
        self._next = 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss, computed in bfloat16."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss: Tensor = model(**batch).loss
        return loss

    def freeze(self, depth: int, directory: Path, *, cached: bool) -> None:
        """Attach, and make the step with which the front `depth` layer modules freeze."""
        given: dict[str, Any] = {"plan": f"0:{depth}", "config": {"cache": {"enabled": "auto" if cached else False}}}
        self.run = egeria.attach(self.model, self.optimizer, total_steps=TOTAL_STEPS, directory=directory, **given)
        self.train(1)

    def train(self, steps: int) -> None:
        """Make so many steps, and wait for the accelerator."""
        self.model.train()
        for _ in range(steps):
            self._next = (self._next + 1) % NUM_BATCHES
            loss = self.loss(self.model, self.batches[self._next])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.run:
                self.run.step(loss)
        _wait(self.device)


@dataclass
class Turns:
    """Trains by turns, and notes the memory that they take."""

    trainer: Trainer
    steps: int
    peak_bytes: int | None = None
    """Of the last turn."""

    def __call__(self) -> None:
        """Take a turn."""
        device = self.trainer.device
        held = _memory(device, peak=False)
        self.trainer.train(self.steps)
        self.peak_bytes = _memory(device, peak=True) - held if device.type == "cuda" else None


def measure(name: str, options: argparse.Namespace) -> list[Row]:
    """Ask for advice, then train with ever more layer modules frozen."""
    device, subject = torch.device(options.device), SUBJECTS[name]
    asked = Trainer(subject, device, options.small)
    advice = egeria.advise(asked.model, asked.optimizer, asked.batches, loss=asked.loss)
    print(f"{name}\n{advice}\n", flush=True)
    most = advice.costs[-1].depth
    depths = sorted({max(1, min(most, round(share * len(advice.modules)))) for share in SHARES}) if most else []
    half = depths[len(depths) // 2 :][:1]
    return [
        *(_row(name, advice, depth, options) for depth in depths),
        *(_row(name, advice, depth, options, cached=True) for depth in half),
    ]


def _row(name: str, advice: egeria.Advice, depth: int, options: argparse.Namespace, *, cached: bool = False) -> Row:
    device, subject = torch.device(options.device), SUBJECTS[name]
    plain, frozen = (Turns(Trainer(subject, device, options.small), options.steps) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        frozen.trainer.freeze(depth, Path(folder), cached=cached)
        found = compare(plain, frozen, rounds=options.rounds, warmup=WARMUP)
        run = frozen.trainer.run
        assert run is not None and run.frozen == depth, "frozen from the start"
        run.close()
    low, _, high = statistics.quantiles(map(operator.truediv, found.second_wall_s, found.first_wall_s), n=4)
    row = Row(
        model=name,
        frozen=depth,
        num_modules=len(advice.modules),
        cached=cached,
        foretold=None if cached else advice.saving(f"0:{depth}"),
        measured=1 - found.total_ratio()[1],
        quartiles=(1 - high, 1 - low),
        plain_ms=1000 * statistics.fmean(found.first_wall_s) / options.steps,
        plain_peak_bytes=plain.peak_bytes,
        frozen_peak_bytes=frozen.peak_bytes,
    )
    print(row, flush=True)
    return row


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device, *, peak: bool) -> int:
    if device.type != "cuda":
        return 0
    if peak:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def describe(rows: list[Row], made_with: dict[str, Any]) -> str:
    """Return the README of the record."""
    lines = [
        "# What frozen layer modules save on an accelerator",
        "",
        "    python -m benchmarks.micro.accelerator --record RECORD",
        "",
        f"Wall-clock time of iterations in bfloat16 on one {made_with['accelerator']}, batches of made-up data. "
        "[How it is measured](../../micro/accelerator.py).",
        "",
        "| model | frozen | plain iteration | foretold | saved (quartiles of rounds) | memory of a step |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        low, high = row.quartiles
        memory = "not counted"
        if row.plain_peak_bytes and row.frozen_peak_bytes:
            memory = f"{row.plain_peak_bytes / 2**30:.2f} to {row.frozen_peak_bytes / 2**30:.2f} GiB"
        foretold = "-" if row.foretold is None else f"{row.foretold:.1%}"
        front = f"{row.frozen} of {row.num_modules}" + ", cached" * row.cached
        lines.append(
            f"| {row.model} | {front} | {row.plain_ms:.1f} ms | {foretold} "
            f"| {row.measured:.1%} ({low:.1%} to {high:.1%}) | {memory} |"
        )
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> None:
    """Measure and print; with `--record` keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SUBJECTS)}; all if none is given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--small", action="store_true", help="small models, to try the command")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for name in options.models or SUBJECTS:
        rows += measure(name, options)
        if options.record:
            made_with = describe_circumstances(torch.device(options.device))
            options.record.mkdir(parents=True, exist_ok=True)
            found = {"rows": [asdict(row) for row in rows], "made_with": made_with}
            found |= {"rounds": options.rounds, "steps_of_a_turn": options.steps}
            (options.record / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            (options.record / "README.md").write_text(describe(rows, made_with), encoding="utf-8")


if __name__ == "__main__":
    main()
