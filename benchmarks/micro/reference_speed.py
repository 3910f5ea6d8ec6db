"""What each number format of the reference model costs and loses, against float32 as the user runs it.

    python -m benchmarks.micro.reference_speed [--models resnet20,bert] [--rounds 7]

Speed is that of a forward pass to the last tap against the plain model in inference mode (float32,
NCHW, no autocast), in one process, in turn, as the median ratio of wall-clock times. The time to make
it, which every refresh takes, is a median over builds behind a warm-up; the SP error is that of the last one. All
weights are random, so errors tell only how the formats compare. Convolutional nets have seen three
batches in training mode, so that their running statistics are real.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from examples.resnet import cifar_resnet
from torch import nn

from benchmarks.micro.interleaved import compare
from benchmarks.models.convnets import mobilenet_v2, resnet50
from egeria.model.batch import Autocast, Batch
from egeria.model.cut import make_modules
from egeria.model.undisturbed import capture, undisturbed
from egeria.plasticity import sp_loss
from egeria.reference import Reference

_PLAIN = Autocast(device_type="cpu", enabled=False, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Subject:
    """A model and the batches it is measured with."""

    model: nn.Module
    batch: Batch
    precisions: tuple[str, ...] = ("int8", "bf16", "fp32")


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"One thread, torch {torch.__version__}.\n")
    print("| model | precision | how | speed | made in s | SP error per tap |")
    print("|---|---|---|---|---|---|")
    for name in options.models.split(","):
        torch.manual_seed(0)
        subject = SUBJECTS[name]()
        for precision in subject.precisions:
            print(f"| {name} | {precision} | {_row(subject, precision, options.rounds)} |", flush=True)


def _row(subject: Subject, precision: str, rounds: int) -> str:
    taps = [module.tap for module in make_modules(subject.model)]
    few, made = subject.batch.first_rows(32), []
    reference = Reference(taps, precision=precision, fidelity_share=math.inf)
    for _ in range(4):
        made.append(_seconds(lambda: reference.refresh(subject.model, few)))
    speed = measure_speed(subject, reference, taps[-1], rounds)
    errors = ", ".join(f"{_error(subject.model, reference, tap, few):.0e}" for tap in taps)
    return f"{reference.builder} | {speed:.1f}x | {statistics.median(made[1:]):.2f} | {errors}"


def measure_speed(subject: Subject, reference: Reference, tap: str, rounds: int) -> float:
    """Return how many times as fast as the plain model the reference gives the activation at a tap."""
    subject.model.eval()

    def plain() -> None:
        with undisturbed(subject.model):
            capture(subject.model, tap, subject.batch)

    return 1 / compare(plain, lambda: _ignore(reference.activation(tap, subject.batch)), rounds=rounds).wall_ratio()


def _ignore(_value: object) -> None:
    pass


def _error(model: nn.Module, reference: Reference, tap: str, batch: Batch) -> float:
    """Return the SP loss of the reference to the model in inference mode."""
    with undisturbed(model):
        expected = capture(model, tap, batch)
    found = reference.activation(tap, batch)
    assert expected is not None and found is not None
    return float(sp_loss(expected, found))


def _seconds(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _images(model: nn.Module, rows: int, side: int) -> Subject:
    images = torch.randn(rows, 3, side, side)
    with torch.no_grad():
        for _ in range(3):
            model.train()(images[:32] + torch.randn(1, 3, 1, 1))
    return Subject(model.eval(), Batch(args=(images,), kwargs={}, autocast=_PLAIN))


def _words(rows: int, **sizes: Any) -> Subject:
    from transformers import BertConfig, BertModel  # noqa: PLC0415 - takes seconds, and not every run needs it

    words = torch.randint(0, 30000, (rows, 128))
    kwargs = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    return Subject(BertModel(BertConfig(**sizes)).eval(), Batch(args=(), kwargs=kwargs, autocast=_PLAIN))


def _minilm() -> Subject:
    return _words(16, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "resnet20": lambda: _images(cifar_resnet(20), 128, 32),
    "resnet56": lambda: _images(cifar_resnet(56), 128, 32),
    "mobilenet_v2-64px": lambda: _images(mobilenet_v2(), 32, 64),
    "mobilenet_v2-224px": lambda: _images(mobilenet_v2(), 8, 224),
    "resnet50-64px": lambda: _images(resnet50(), 32, 64),
    "resnet50-224px": lambda: _images(resnet50(), 8, 224),
    "minilm": _minilm,
    "bert": lambda: _words(8),
}


if __name__ == "__main__":
    main()
