"""What comes of training the predictor of 'smartfrz': its weights, its card, and the numbers behind that."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.proving.comparing.tables import markdown
from benchmarks.proving.running.recipe import describe_circumstances
from benchmarks.proving.running.stopwatch import Stopwatch
from benchmarks.proving.studies.smartfrz import (
    Examples,
    Labelling,
    Threshold,
    Verdict,
    Watched,
    fit,
    judge,
    without_each,
)
from egeria.smartfrz import NUM_SNAPSHOTS, NUM_WEIGHTS, save_predictor

BEGINNINGS = 3
"""From how many random beginnings it is trained, to tell the spread; the first is kept."""


@dataclass(frozen=True)
class Lesson:
    """What the predictor is to learn, and from what."""

    found: Sequence[Watched]
    """All trainings that were watched."""
    held_out: Sequence[int]
    """Seeds that it is judged by and not trained on."""
    labelling: Labelling
    epochs: int
    """Over the examples."""


def train_and_record(lesson: Lesson, folder: Path, console: Console) -> None:
    """Train the predictor, judge it on what it has not seen, and write both.

    Args:
        lesson: what it is to learn.
        folder: gets predictor.safetensors, CARD.md and results.json.
        console: is told how far it is.
    """
    found, held_out, labelling, epochs = lesson.found, lesson.held_out, lesson.labelling, lesson.epochs
    watch = Stopwatch(torch.device("cpu"))
    watch.go()
    seen = [entry for entry in found if entry.seed not in held_out]
    unseen = [entry for entry in found if entry.seed in held_out]
    examples, tests = (Examples.of(entries, labelling) for entries in (seen, unseen))
    folder.mkdir(parents=True, exist_ok=True)
    on_seeds: list[Verdict] = []
    for beginning in range(BEGINNINGS):
        predictor = fit(examples, seed=beginning, epochs=epochs)
        on_seeds.append(judge(predictor, tests))
        console.print(f"held-out seeds, beginning {beginning}: {on_seeds[-1].right:.1%} right", highlight=False)
        if not beginning:
            save_predictor(predictor, folder / "predictor.safetensors")
    by_movement = judge(Threshold.fit(examples), tests)
    on_networks: dict[str, Verdict] = {}
    for name, others, own in without_each(found):
        learned = Examples.of([entry for entry in others if entry.seed not in held_out], labelling)
        on_networks[name] = judge(fit(learned, seed=0, epochs=epochs), Examples.of(own, labelling))
        console.print(f"without {name}: {on_networks[name].right:.1%} right", highlight=False)
    watch.halt()
    results: dict[str, Any] = {
        "workloads": list(dict.fromkeys(entry.workload for entry in found)),
        "seeds": sorted({entry.seed for entry in seen}),
        "held_out_seeds": sorted(held_out),
        "labelling": asdict(labelling),
        "epochs": epochs,
        "num_examples": len(examples.labels),
        "freeze_share": examples.share,
        "on_seeds": [{**asdict(verdict), "balanced": verdict.balanced} for verdict in on_seeds],
        "by_movement": {**asdict(by_movement), "balanced": by_movement.balanced},
        "on_networks": {
            name: {**asdict(verdict), "balanced": verdict.balanced} for name, verdict in on_networks.items()
        },
        "training_cpu_s": watch.cpu_s,
        "made_with": describe_circumstances(torch.device("cpu")),
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "CARD.md").write_text(describe(results, on_seeds, on_networks), encoding="utf-8")


CARD = """\
# Predictor of the policy 'smartfrz'

From {snapshots} snapshots of {weights:,} weights of a layer module, evenly spaced over a twentieth of the training, it
says whether the layer module may freeze. Attention as in SmartFRZ (arXiv 2401.16720), 1.04 million parameters, kept in
half precision. Only like it: the paper's text leaves open what its own was trained on, and these are our trainings.

- Trained on: plain trainings of {names}, seeds {seeds}: {num_examples:,} examples, {freeze_share:.0%} of them "freeze".
  {epochs} epochs, AdamW.
- Labelled "freeze": linear CKA to the network at the end of the training is over {least_cka:g}, and its variance over
  {span} intervals under {most_variance:g}. CKA is taken of samples of the training data, in inference mode.
- Right of {right:.1%} of the examples of held-out seeds, from {beginnings} beginnings {least:.1%} to {most:.1%}.
- Training it took {minutes:.0f} minutes of one core, {beginnings} beginnings and one for each network left out; what it
  learns from is besides.
- Asking it once about one layer module: 123 KB, some 10 million multiplications.

{table}

    {command}
"""


def describe(results: dict[str, Any], on_seeds: Sequence[Verdict], on_networks: dict[str, Verdict]) -> str:
    """Return the card."""
    rights = [verdict.right for verdict in on_seeds]
    by_movement = {name: value for name, value in results["by_movement"].items() if name != "balanced"}
    rows = [_row("held-out seeds", on_seeds[0])]
    rows += [_row("the same, by a threshold on how far weights moved", Verdict(**by_movement))]
    rows += [_row(f"{name}, trained without it", verdict) for name, verdict in on_networks.items()]
    header = ["judged by", "examples", "right", 'right of "freeze"', 'right of "train"', "mean of both", "one answer"]
    held_out = ",".join(map(str, results["held_out_seeds"]))
    seeds = ",".join(map(str, [*results["seeds"], *results["held_out_seeds"]]))
    return CARD.format(
        **{name: value for name, value in results.items() if name not in ("seeds", "labelling")},
        **results["labelling"],
        snapshots=NUM_SNAPSHOTS,
        weights=NUM_WEIGHTS,
        names=", ".join(results["workloads"]),
        seeds=", ".join(map(str, results["seeds"])),
        right=statistics.fmean(rights),
        beginnings=len(rights),
        least=min(rights),
        most=max(rights),
        minutes=results["training_cpu_s"] / 60,
        table=markdown(header, rows),
        command=f"python -m benchmarks smartfrz {','.join(results['workloads'])} --seeds {seeds} --held-out {held_out} "
        f"--epochs {results['epochs']} --least-cka {results['labelling']['least_cka']:g} "
        f"--most-variance {results['labelling']['most_variance']:g} --span {results['labelling']['span']} "
        "--data DIR --out FOLDER",
    )


def _row(name: str, verdict: Verdict) -> list[str]:
    shares = (verdict.right, verdict.right_of_freeze, verdict.right_of_train, verdict.balanced, verdict.common)
    return [name, f"{verdict.num_examples:,}", *("-" if math.isnan(share) else f"{share:.1%}" for share in shares)]
