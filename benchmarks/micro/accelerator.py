"""What frozen layer modules save on an accelerator, at the size of real models: time and memory of an iteration.

    python -m benchmarks.micro.accelerator [MODEL ...] [--compiled] [--minutes 3] [--tiny] [--record DIR]

Times only, on made-up batches: what is learnt does not matter to them. Copies of a model train in one process in
turn, a few steps each, in bfloat16: one plainly, one attached with nothing frozen, and one each with a third, half,
two thirds and all but the last of the layer modules frozen from the first step. A turn ends when the accelerator has
done all of it. What is saved is 1 less the ratio to the plain turn of the same round, as median and quartiles. The
cache is off.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import egeria
from benchmarks.proving.running.recipe import describe_circumstances

Batch = dict[str, Tensor]
SHARES = {"a third": 1 / 3, "half": 1 / 2, "two thirds": 2 / 3, "all but the last": 1.0}
COMPILED_SHARES = ("half", "all but the last")
"""Each depth is compiled anew, which takes half a minute."""
STEPS, WARMUP, FEWEST, MOST = 5, 3, 4, 40
"""Steps of a turn, turns that are not counted, and the fewest and the most rounds that are."""
NUM_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model as it is trained; both are called with whether it shall be tiny."""

    make: Callable[[bool], nn.Module]
    batch: Callable[[bool], Batch]
    is_convolutional: bool = False


def _bert(tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 (slow to import)

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64} if tiny else {}
    return BertForSequenceClassification(BertConfig(num_hidden_layers=4 if tiny else 12, **sizes))


def _sentences(tiny: bool) -> Batch:
    count, length = (4, 16) if tiny else (32, 128)
    return {"input_ids": torch.randint(1000, 30_000, (count, length)), "labels": torch.randint(0, 2, (count,))}


def _gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 4, "vocab_size": 1000} if tiny else {}
    return GPT2LMHeadModel(GPT2Config(**sizes))


def _texts(tiny: bool) -> Batch:
    tokens = torch.randint(0, 1000, (2, 32) if tiny else (8, 512))
    return {"input_ids": tokens, "labels": tokens}


def _vit(tiny: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification  # noqa: PLC0415

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 4}
    return ViTForImageClassification(ViTConfig(num_labels=1000, **(sizes if tiny else {})))


def _resnet50(tiny: bool) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification  # noqa: PLC0415

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 2, 2]} if tiny else {}
    return ResNetForImageClassification(ResNetConfig(num_labels=1000, **sizes))


def _images(tiny: bool) -> Batch:
    count = 2 if tiny else 64
    return {"pixel_values": torch.randn(count, 3, 224, 224), "labels": torch.randint(0, 1000, (count,))}


SUBJECTS = {
    "bert-base": Subject(make=_bert, batch=_sentences),
    "vit-base": Subject(make=_vit, batch=_images),
    "resnet50": Subject(make=_resnet50, batch=_images, is_convolutional=True),
    "gpt2": Subject(make=_gpt2, batch=_texts),
}


@dataclass
class Copy:
    """One copy of a model in training; `seconds` are those of its counted turns."""

    subject: Subject
    options: argparse.Namespace
    batches: list[Batch]
    plan: str | None
    """None trains plainly; empty attaches and freezes nothing."""
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """Most memory that it had in use: weights, gradients, optimizer state and activations."""

    def __post_init__(self) -> None:
        device = torch.device(self.options.device)
        self._held_bytes = 0
        before_bytes = self._allocated()
        torch.manual_seed(0)
        self.model = self.subject.make(self.options.tiny).to(device)
        if self.subject.is_convolutional:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5)
        self.called: Any = torch.compile(self.model) if self.options.compiled else self.model
        self.run: egeria.Run | None = None
        if self.plan is not None:
            # Of these the cut is that of a fine-tuning.
            config = {"policy": {"pretrained": True, "plan": self.plan}, "cache": {"enabled": False}}
            self._folder = tempfile.TemporaryDirectory()
            given: dict[str, Any] = {"total_steps": 10**6, "config": config, "directory": self._folder.name}
            self.run = egeria.attach(self.called, self.optimizer, **given)
        for _ in range(WARMUP):
            self.take_turn()
        self.seconds, self.peak_bytes = [], 0
        self._held_bytes = self._allocated() - before_bytes

    def take_turn(self) -> None:
        """Make a few steps, and wait for the accelerator."""
        device, before_bytes = torch.device(self.options.device), self._allocated()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        self.model.train()
        for number in range(STEPS):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = self.called(**self.batches[number % NUM_BATCHES]).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.run is not None:
                self.run.step(loss)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            peak_bytes = torch.cuda.max_memory_allocated(device) - before_bytes + self._held_bytes
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.seconds.append(time.perf_counter() - begin)

    def close(self) -> None:
        """Leave nothing behind."""
        if self.run is not None:
            self.run.close()
            self._folder.cleanup()

    def _allocated(self) -> int:
        device = torch.device(self.options.device)
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of training a model; what is saved is a share of the time of a plain iteration."""

    model: str
    way: str
    frozen: int
    num_modules: int
    iteration_ms: float
    saved: float
    quartiles: tuple[float, float]
    peak_bytes: int
    """0 where the device does not say."""
    rounds: int


def measure(name: str, options: argparse.Namespace, seconds: float) -> list[Row]:
    """Train all copies of a model in turn for about so many seconds; return a row for each."""
    ends, subject, device = time.monotonic() + seconds, SUBJECTS[name], torch.device(options.device)
    torch.manual_seed(0)
    drawn = [subject.batch(options.tiny) for _ in range(NUM_BATCHES)]
    batches = [{key: tensor.to(device) for key, tensor in batch.items()} for batch in drawn]
    copies = {way: Copy(subject, options, batches, plan) for way, plan in (("plain", None), ("attached", ""))}
    run = copies["attached"].run
    assert run is not None
    num_modules = len(run.modules)
    for way in COMPILED_SHARES if options.compiled else SHARES:
        depth = min(max(1, round(SHARES[way] * num_modules)), num_modules - 1)
        copies[way] = Copy(subject, options, batches, f"0:{depth}")
    num_rounds = 0
    while num_rounds < FEWEST or (num_rounds < MOST and time.monotonic() < ends):
        order = list(copies.values())
        for copy in order if num_rounds % 2 else reversed(order):
            copy.take_turn()
        num_rounds += 1
    plain_s, rows = copies["plain"].seconds, []
    for way, copy in copies.items():
        ratios = [own / other for own, other in zip(copy.seconds, plain_s, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = Row(
            model=f"{name}{', compiled' if options.compiled else ''}",
            way=way,
            frozen=copy.run.frozen if copy.run else 0,
            num_modules=num_modules,
            iteration_ms=1000 * statistics.median(copy.seconds) / STEPS,
            saved=1 - middle,
            quartiles=(1 - high, 1 - low),
            peak_bytes=copy.peak_bytes,
            rounds=num_rounds,
        )
        copy.close()
        print(_line(row), flush=True)
        rows.append(row)
    return rows


def _line(row: Row) -> str:
    low, high = row.quartiles
    saved = "" if row.way == "plain" else f"{row.saved:.1%} ({low:.1%} to {high:.1%})"
    memory = f"{row.peak_bytes / 2**30:.2f} GiB" if row.peak_bytes else "not told"
    what = f"{row.frozen} of {row.num_modules}" if row.frozen else "none"
    return f"| {row.model} | {row.way} | {what} | {row.iteration_ms:.1f} ms | {saved} | {memory} |"


def describe(rows: list[Row], made_with: dict[str, Any]) -> str:
    """Return the README of the record."""
    return "\n".join(
        [
            "# What frozen layer modules save on an accelerator",
            "",
            f"Wall-clock time of iterations in bfloat16 on {made_with['accelerator']}, torch {made_with['torch']}, "
            "batches of made-up data. [How it is measured](../../micro/accelerator.py).",
            "",
            "| model | way | frozen | iteration | saved (quartiles of rounds) | most memory |",
            "| --- | --- | --- | ---: | ---: | ---: |",
            *map(_line, rows),
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure and print; with `--record` keep, beside what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SUBJECTS)}; all if none is given")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile, at two depths")
    parser.add_argument("--minutes", type=float, default=3.0, help="for all models together")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the command")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args(arguments)
    models = options.models or list(SUBJECTS)
    rows = list[Row]()
    if options.record and (path := options.record / "results.json").exists():
        rows += [Row(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    for name in models:
        rows += measure(name, options, 60 * options.minutes / len(models))
        if options.record:
            made_with = describe_circumstances(torch.device(options.device))
            options.record.mkdir(parents=True, exist_ok=True)
            found = {"rows": [asdict(row) for row in rows], "made_with": made_with, "steps_of_a_turn": STEPS}
            (options.record / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            (options.record / "README.md").write_text(describe(rows, made_with), encoding="utf-8")


if __name__ == "__main__":
    main()
