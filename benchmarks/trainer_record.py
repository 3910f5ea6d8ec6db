"""A record with Hugging Face's Trainer: MiniLM on SST-2, plainly and with one line, several seeds in turn.

    python -m benchmarks.trainer_record --data DIR --record benchmarks/records/NAME

Each run is a process of its own; of a seed the two kinds run next to each other, and which is first alternates. What
is there already is skipped. Held out are the sentences of `dev.tsv` and 6,000 of `train.tsv` that no run trains on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import egeria
from benchmarks.proving.comparing import archive
from benchmarks.proving.comparing.statistics import spread
from benchmarks.proving.running.recipe import ROOT, commit
from benchmarks.workloads.text.corpora import read_sentiments
from benchmarks.workloads.text.minilm import find_weights
from egeria.events import ModuleFrozen, StageChanged, Thawed

KINDS = ("plain", "egeria")
NUM_TRAIN, NUM_HELD_OUT, LONGEST = 6000, 6000, 64
OPTIONS = {
    "num_train_epochs": 3,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
    "learning_rate": 1e-4,
    "warmup_steps": 56,
    "weight_decay": 0.01,
    "logging_steps": 20,
    "save_strategy": "no",
    "report_to": ["tensorboard"],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": True,
}


def main() -> None:
    """Run what is missing, then write the record; or make one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--run", nargs=2, metavar=("KIND", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        kind, seed = options.run
        print(json.dumps(train(options.data, options.record, kind, int(seed))))
        return
    options.record.mkdir(parents=True, exist_ok=True)
    with archive.unpacked(options.record) as options.runs:
        results = make_runs(options)
        (options.record / "scalars.json").write_text(json.dumps(read_scalars(options, results), indent=1) + "\n")
        shutil.copy(egeria.report(options.runs / "egeria-seed0" / "egeria").path, options.record / "report.html")
        (options.record / "README.md").write_text(describe(options, results))


def make_runs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train what the record lacks; return the results of all runs."""
    path = options.record / "results.json"
    results = json.loads(path.read_text()) if path.exists() else []
    for seed in range(options.seeds):
        for kind in KINDS[:: 1 if seed % 2 == 0 else -1]:
            if any(entry["seed"] == seed and entry["kind"] == kind for entry in results):
                continue
            found = run_in_a_process(options, kind, seed)
            results.append({"kind": kind, "seed": seed, "commit": commit(), **found})
            path.write_text(json.dumps(results, indent=1) + "\n")
    return results


def run_in_a_process(options: argparse.Namespace, kind: str, seed: int) -> dict[str, Any]:
    """Make one run in a process of its own, with one thread; return what it found."""
    folder = options.runs / f"{kind}-seed{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was broken off: this record's own folder
    command = [sys.executable, "-m", "benchmarks.trainer_record", "--data", str(options.data), "--record", str(folder)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [*command, "--run", kind, str(seed)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    line = done.stdout.strip().splitlines()[-1]
    print(kind, seed, line, flush=True)
    return json.loads(line)


def train(data: Path, folder: Path, kind: str, seed: int) -> dict[str, Any]:
    """Fine-tune once; return the accuracy in % and the seconds that `Trainer.train` took.

    CPU seconds are of the process and of those that it started, a controller process among them.
    """
    from transformers import (  # noqa: PLC0415  # the command that starts the runs does without
        AutoTokenizer,
        BertForSequenceClassification,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    from egeria.integrations.transformers import EgeriaCallback  # noqa: PLC0415

    set_seed(seed)
    weights = find_weights(data)
    tokenizer = AutoTokenizer.from_pretrained(weights)
    train_part, held_out = split(data)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=BertForSequenceClassification.from_pretrained(weights, num_labels=2),
            args=TrainingArguments(output_dir=output, seed=seed, **OPTIONS),
            train_dataset=encode(tokenizer, train_part),
            data_collator=DataCollatorWithPadding(tokenizer),
            callbacks=[EgeriaCallback(directory=folder / "egeria")] if kind == "egeria" else [],
        )
        begin, begin_cpu = time.perf_counter(), cpu_s()
        trainer.train()
        wall_s, used_s = time.perf_counter() - begin, cpu_s() - begin_cpu
        accuracy = {}
        for name, rows in held_out.items():
            found = trainer.predict(encode(tokenizer, rows))
            accuracy[name] = 100 * float((found.predictions.argmax(1) == found.label_ids).mean())
    return {"accuracy": accuracy, "wall_s": wall_s, "cpu_s": used_s, "steps": trainer.state.global_step}


def split(data: Path) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return the sentences to train on, the same for all seeds, and those held out, by name."""
    sentences = read_sentiments(data, "train")
    order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [sentences[index] for index in order[: NUM_TRAIN + NUM_HELD_OUT]]
    return chosen[:NUM_TRAIN], {"unused": chosen[NUM_TRAIN:], "dev": read_sentiments(data, "dev")}


def encode(tokenizer: Any, sentences: list[Any]) -> list[dict[str, Any]]:
    """Return the rows of a data set."""
    rows = []
    for text, label in sentences:
        rows.append({**tokenizer(text, truncation=True, max_length=LONGEST), "labels": label})
    return rows


def cpu_s() -> float:
    """Return the CPU seconds of this process and of the ended ones that it started."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(entry.ru_utime + entry.ru_stime for entry in found)


def read_scalars(options: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what TensorBoard shows of each run: by tag, the steps and the values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    shown: dict[str, Any] = {}
    for name in (f"{entry['kind']}-seed{entry['seed']}" for entry in results):
        events = EventAccumulator(str(options.runs / name / "tensorboard"))
        events.Reload()
        tags = sorted(events.Tags()["scalars"])
        shown[name] = {tag: [[entry.step, round(entry.value, 6)] for entry in events.Scalars(tag)] for tag in tags}
    return shown


def decided(directory: Path) -> str:
    """Return what a run decided, by step."""
    said = []
    for event in egeria.read_journal(directory):
        if isinstance(event, StageChanged):
            said.append(f"bootstrapping ends {event.step}")
        elif isinstance(event, ModuleFrozen):
            said.append(f"{event.name} {event.step}")
        elif isinstance(event, Thawed):
            said.append(f"thaw {event.step}")
    return ", ".join(said) or "nothing"


def describe(options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    """Return the text of the record: numbers first, then how to repeat them."""
    rows = [
        f"| run | seed | accuracy %, {NUM_HELD_OUT:,} unused | accuracy %, dev | CPU s | wall s | decided, by step |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in sorted(results, key=lambda entry: (entry["seed"], entry["kind"] != "plain")):
        what = decided(options.runs / f"egeria-seed{entry['seed']}" / "egeria") if entry["kind"] == "egeria" else ""
        found = entry["accuracy"]
        rows.append(
            f"| {entry['kind']} | {entry['seed']} | {found['unused']:.2f} | {found['dev']:.2f} "
            f"| {entry['cpu_s']:.0f} | {entry['wall_s']:.0f} | {what} |"
        )
    pairs = [
        {entry["kind"]: entry for entry in results if entry["seed"] == seed}
        for seed in sorted({entry["seed"] for entry in results})
    ]
    claims = []
    for name, what in (("unused", f"{NUM_HELD_OUT:,} sentences that no run trains on"), ("dev", "the 872 of dev.tsv")):
        points = spread([pair["egeria"]["accuracy"][name] - pair["plain"]["accuracy"][name] for pair in pairs])
        claims.append(f"- accuracy on {what}, egeria minus plain: {points.shows(signed=True, interval=True)} points")
    for unit, what in (("cpu_s", "CPU time"), ("wall_s", "wall-clock time")):
        saved = spread([100 * (1 - pair["egeria"][unit] / pair["plain"][unit]) for pair in pairs])
        claims.append(f"- {what} saved: {saved.shows(1, signed=True, interval=True)} %")
    return "\n".join(
        [
            "# Hugging Face's Trainer: MiniLM on SST-2, plain and with one line",
            "",
            f"`Trainer(..., callbacks=[EgeriaCallback()])` against the same Trainer without it, {len(pairs)} "
            f"seeds; same seed = same head, data order and dropout. {NUM_TRAIN:,} sentences, {results[0]['steps']} "
            "steps, AdamW, linear schedule with warmup, bf16, the default policy. Paired, mean and 95 % interval "
            "(Student's t):",
            "",
            *claims,
            "",
            *rows,
            "",
            "Time: seconds of `Trainer.train`, logging to TensorBoard included in both, evaluation excluded. CPU "
            "seconds are of the process and of its controller process. Other jobs may share the machine: CPU time says "
            "more than wall-clock time.",
            f"Machine: {os.cpu_count()} cores, 1 torch thread, no accelerator; python {platform.python_version()}, "
            f"torch {torch.__version__}, egeria {egeria.__version__} at commit "
            f"{', '.join(sorted({entry['commit'] for entry in results}))}.",
            "",
            "`scalars.json` has what TensorBoard shows of each run, `report.html` is the report of seed 0, and "
            "`journals.tar.xz` has the journals and the files of TensorBoard "
            "(`tar xf journals.tar.xz -C FOLDER; tensorboard --logdir FOLDER`).",
            "",
            "```",
            f"python -m benchmarks.trainer_record --data DIR --record RECORD --seeds {len(pairs)}",
            "```",
            "",
        ]
    )


if __name__ == "__main__":
    main()
