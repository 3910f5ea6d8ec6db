"""The number format of the reference model: what it does to the training, its speed and its accuracy (paper §6.4).

    python -m benchmarks.reference_formats --data DIR --record RECORD [--seeds 3]

For each seed `examples/cifar10.py` trains plainly and with the reference in int8, bf16 and fp32, in turn,
evaluations in the training process. The weights of the plain run are then put into each format:
its speed is that of a forward pass against fp32 eager, interleaved, at one thread; its accuracy gap is how many
more of the test images it gets wrong than fp32 does. Runs that are there already are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from examples.cifar10 import DEVIATION, MEAN, Cifar10, load
from examples.resnet import cifar_resnet
from torch import Tensor, nn

import egeria
from benchmarks.micro.interleaved import compare
from benchmarks.proving.comparing import archive
from benchmarks.proving.journal import read_journal
from benchmarks.proving.running.recipe import commit
from egeria.model.passes import Batch
from egeria.reference import Reference

FORMATS = ("int8", "bf16", "fp32")
HEAD = "linear"


def main() -> None:
    """Run what is missing, then write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="folder with published weights of ResNet-20 and ResNet-56, as npz")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default="resnet8")
    parser.add_argument("--samples", type=int, default=10000)
    parser.add_argument("--epochs", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with archive.unpacked(options.record) as options.journals:
        make_record(options)


def make_record(options: argparse.Namespace) -> None:
    """Train and judge what the record lacks, and describe all of it."""
    path = options.record / "results.json"
    results: dict[str, dict] = json.loads(path.read_text()) if path.exists() else {}
    for seed in range(options.seeds):
        for kind in ("plain", *FORMATS):
            name = f"{kind}-seed{seed}"
            if name not in results:
                results[name] = {"commit": commit(), **train(options, kind, seed)}
                path.write_text(json.dumps(results, indent=1) + "\n")
        if f"formats-seed{seed}" not in results:
            results[f"formats-seed{seed}"] = judge_run(options, seed)
            path.write_text(json.dumps(results, indent=1) + "\n")
    for name in ("resnet20", "resnet56") if options.weights else ():
        results.setdefault(f"trained-{name}", judge_trained(options, name))
    path.write_text(json.dumps(results, indent=1) + "\n")
    (options.record / "README.md").write_text(describe(options, results))


def train(options: argparse.Namespace, kind: str, seed: int) -> dict:
    """Train once, plainly or with the reference in one format."""
    arguments = ["--data", options.data, "--model", options.model, "--samples", options.samples]
    arguments += ["--epochs", options.epochs, "--seed", seed]
    directory = options.journals / f"{kind}-seed{seed}"
    if kind == "plain":
        return run_example([str(part) for part in [*arguments, "--plain", "--save", weights(options, seed)]])
    shutil.rmtree(directory, ignore_errors=True)
    config = options.record / f"{kind}.toml"
    policy = '[policy]\nname = "egeria"\n\n'
    config.write_text(f'{policy}[reference]\nprecision = "{kind}"\n\n[controller]\nkind = "inline"\n')
    result = run_example([str(part) for part in [*arguments, "--config", config, "--directory", directory]])
    return {**result, "rungs": [rung["after"] for rung in read_journal(directory).of("rung")]}


def weights(options: argparse.Namespace, seed: int) -> Path:
    """Return where the weights of a plain run lie; they are no part of the record."""
    return options.record / f"weights-seed{seed}.pt"


def judge_run(options: argparse.Namespace, seed: int) -> dict[str, dict]:
    """Return speed and accuracy of each format, for the weights of a plain run."""
    model = cifar_resnet(int(options.model.removeprefix("resnet")))
    model.load_state_dict(torch.load(weights(options, seed)))
    return judge_formats(options, model.eval(), lambda images: images)


def judge_trained(options: argparse.Namespace, name: str) -> dict[str, dict]:
    """Return speed and accuracy of each format, for published weights ('resnet20', 'resnet56')."""
    (path,) = options.weights.glob(f"{name}-*.npz")
    model = cifar_resnet(int(name.removeprefix("resnet")))
    arrays = np.load(path)
    model.load_state_dict({key: torch.from_numpy(arrays[key]) for key in arrays.files}, strict=False)
    return judge_formats(options, model.eval(), as_imagenet)


def judge_formats(
    options: argparse.Namespace, model: nn.Module, prepare: Callable[[Tensor], Tensor]
) -> dict[str, dict[str, float | str]]:
    """Put a model into each format; return its rung, speed, and accuracy gap in points."""
    training = Cifar10(*load(options.data, ["data_batch_1"]))
    test = Cifar10(*load(options.data, ["test_batch"]))

    def batch(data: Cifar10, begin: int, end: int) -> Batch:
        images = prepare(data.__getitems__(list(range(begin, end)))[0])
        return Batch.of_call((images.contiguous(),), {}, "cpu")

    @torch.no_grad()
    def accuracy(classify: Callable[[Batch], Tensor]) -> float:
        correct = 0
        for begin in range(0, len(test), 500):
            labels = test.labels[begin : begin + 500]
            correct += int((classify(batch(test, begin, begin + 500)).argmax(1) == labels).sum())
        return 100 * correct / len(test)

    exact = accuracy(lambda inputs: model(*inputs.args))
    found: dict[str, dict[str, float | str]] = {}
    for kind in FORMATS:
        reference = Reference([HEAD], precision=kind, fidelity_share=math.inf)
        reference.refresh(model, batch(training, 0, 32))
        gap = exact - accuracy(lambda inputs, reference=reference: reference.activation(HEAD, inputs))
        found[kind] = {
            "rung": reference.builder,
            "speed": speed(model, reference, batch(test, 0, 128)),
            "gap": gap,
        }
    return {"exact": exact, **found}


def as_imagenet(images: Tensor) -> Tensor:
    """Return images normalised by this script's figures as they are by those of ImageNet."""
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = (images * DEVIATION + MEAN) / 255
    return (pixels - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)


def speed(model: nn.Module, reference: Reference, batch: Batch) -> float:
    """Return how many times faster a format's forward pass is than fp32 eager."""

    @torch.no_grad()
    def eager() -> None:
        model(*batch.args)

    return 1 / compare(eager, lambda: reference.activation(HEAD, batch), rounds=15).cpu_ratio()


def describe(options: argparse.Namespace, results: dict[str, dict]) -> str:
    """Return the text of the record."""
    seeds = range(options.seeds)
    header = "| reference | final accuracy % | minus plain | CPU time saved % | speed of its forward | accuracy gap |"
    rows = [header, "|---|---|---|---|---|---|"]
    plain = [results[f"plain-seed{seed}"] for seed in seeds]
    rows.append(f"| (plain training) | {spread([run['accuracy'] for run in plain])} | | | | |")
    for kind in FORMATS:
        runs = [results[f"{kind}-seed{seed}"] for seed in seeds]
        judged = [results[f"formats-seed{seed}"][kind] for seed in seeds]
        less = [run["accuracy"] - base["accuracy"] for run, base in zip(runs, plain, strict=True)]
        saved = [100 * (1 - run["cpu_s"] / base["cpu_s"]) for run, base in zip(runs, plain, strict=True)]
        rows.append(
            f"| {kind} ({judged[0]['rung']}) | {spread([run['accuracy'] for run in runs])} | {spread(less)} "
            f"| {spread(saved)} | {spread([entry['speed'] for entry in judged])}x "
            f"| {spread([entry['gap'] for entry in judged])} |"
        )
    return "\n".join(
        [
            f"# The number format of the reference: {options.model} on CIFAR-10 (the paper's §6.4 at our scale)",
            "",
            f"{options.samples:,} images, {options.epochs} epochs, step schedule, {options.seeds} seeds, mean ± sd; "
            "paired with the plain run of the same seed. Formats were kept while their error was below a tenth of the "
            "plasticity; accuracy gap in points of test accuracy of the trained model; speed against fp32 eager, one "
            "thread, batch of 128, interleaved.",
            "",
            *rows,
            "",
            *trained_rows(results),
            "Formats of the reference in the course of each run, by seed:",
            "",
            *(f"- {kind}: {courses(options, results, kind)}" for kind in FORMATS),
            "",
            f"Machine: {os.cpu_count()} cores, one torch thread, no accelerator; python {platform.python_version()}, "
            f"torch {torch.__version__}, egeria {egeria.__version__} at commit "
            f"{', '.join(sorted({entry['commit'] for entry in results.values() if 'commit' in entry}))}.",
            "",
            "```",
            f"python -m benchmarks.reference_formats --data DIR --record RECORD --seeds {options.seeds} "
            f"--model {options.model} --samples {options.samples} --epochs {options.epochs}",
            "```",
            "",
        ]
    )


def trained_rows(results: dict[str, dict]) -> list[str]:
    """Return the table of the published weights, where they were measured."""
    names = [name for name in results if name.startswith("trained-")]
    if not names:
        return []
    rows = ["Published, fully trained weights:", "", "| model | fp32 eager % | format | speed | accuracy gap |"]
    rows.append("|---|---|---|---|---|")
    for name in names:
        for kind in FORMATS:
            entry = results[name][kind]
            rows.append(
                f"| {name.removeprefix('trained-')} | {results[name]['exact']:.2f} | {kind} ({entry['rung']}) "
                f"| {entry['speed']:.2f}x | {entry['gap']:+.2f} |"
            )
    return [*rows, ""]


def courses(options: argparse.Namespace, results: dict[str, dict], kind: str) -> str:
    """Return which formats the reference had in the runs of a format."""
    return "; ".join(" > ".join(results[f"{kind}-seed{seed}"]["rungs"]) for seed in range(options.seeds))


def spread(values: list[float]) -> str:
    """Return mean and standard deviation as text."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{deviation}"


def run_example(
    arguments: list[str], *, threads: int = 1, started: Callable[[subprocess.Popen[str]], object] = lambda process: None
) -> dict[str, object]:
    """Run the example once; return the final accuracy in %, the seconds of training and the accuracy of each epoch.

    Args:
        arguments: of the example.
        threads: of torch.
        started: called with the process as soon as it runs.
    """
    command = [
        sys.executable,
        "-u",
        str(Path(__file__).resolve().parent.parent / "examples" / "cifar10.py"),
        *arguments,
    ]
    print("$", *command[2:], flush=True)
    # Waiting threads that spin would count as CPU time and slow a busy machine down.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        started(process)
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.split())
    if process.returncode:
        raise SystemExit(f"the run failed with status {process.returncode}")
    curve = [float(line[5].rstrip("%")) for line in lines if line[0] == "epoch"]
    last = lines[-1]
    return {"accuracy": float(last[1].rstrip("%")), "wall_s": float(last[3]), "cpu_s": float(last[6]), "curve": curve}


if __name__ == "__main__":
    main()
