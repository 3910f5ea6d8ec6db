"""CPU time of an epoch with the front of a model frozen: computed, and from the cache on the disk and in memory.

    python -m benchmarks.micro.cached_iteration [--data DIR] [--subjects resnet20,bert] [--samples 2048] [--rounds 12]
                                                [--precision bf16] [--warm] [--record RECORD]
    torchrun --nproc-per-node 2 -m benchmarks.micro.cached_iteration ...

Each way trains a model of its own in this process, an epoch at a time, in turn; all but the plain one are attached with
a plan that freezes the front at once. 'for nothing' has a front that always gives the same answer, which no cache can
beat. CPU time is of all threads; each epoch is compared with the plain one of its round. The pages of stored files are
dropped before each epoch, so that activations come from the disk, unless `--warm` is given. The first epoch behind the
freeze, which fills the store, is not among the rounds: it is told apart. Started by torchrun, the processes train
together (DistributedDataParallel, samples by `egeria.ShardSampler`), and the first one tells of itself.
"""

import argparse
import inspect
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from examples.cifar10 import Cifar10, load
from examples.resnet import cifar_resnet
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import egeria
from benchmarks.proving.journal import read_journal
from benchmarks.proving.running.recipe import describe_circumstances

PLAIN, FLOOR = "plain", "for nothing"
KINDS: dict[str, dict[str, Any]] = {
    "computed": {"enabled": False},
    "disk": {"enabled": True, "gate": "open", "verify_batches": 10**9},
    "memory": {"enabled": "auto", "gate": "open", "verify_batches": 10**9},
    FLOOR: {"enabled": False},
}
"""Settings of the cache, by way."""
TOTAL_STEPS = 4000
"""That egeria is told: the end is far."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and what it is trained on; everything it makes is new and the same each time."""

    build: Callable[[], nn.Module]
    loader: Callable[[], DataLoader[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    depths: tuple[int, ...]
    kinds: Sequence[str] = tuple(KINDS)


class Way:
    """One way to train: a model of its own, its loader, and egeria but for the plain one."""

    def __init__(self, subject: Subject, depth: int, kind: str, autocast: bool, folder: Path) -> None:
        torch.manual_seed(0)
        self.name = f"depth {depth}, {kind}" if depth else PLAIN
        self.depth, self.folder, self.run = depth, folder / self.name.replace(" ", "-"), None
        self._subject, self._kind, self._autocast = subject, kind, autocast
        self.model, self.loader = subject.build().train(), subject.loader()
        self._called: nn.Module = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self._epochs = itertools.count()
        self.optimizer = subject.optimizer(self.model)
        self._random_state = torch.get_rng_state()

    def freeze(self) -> None:
        """Attach, and train until the front is frozen."""
        if not self.depth:
            return
        config: dict[str, Any] = {"cache": KINDS[self._kind], "policy": {"name": "static", "plan": f"0:{self.depth}"}}
        if "plan" not in inspect.signature(egeria.attach).parameters:  # an earlier version
            config["policy"] = {"name": "static", "schedule": f"0:{self.depth}"}
        self.run = egeria.attach(
            self._called, self.optimizer, self.loader, total_steps=TOTAL_STEPS, directory=self.folder, config=config
        )
        for _ in range(100):  # with an earlier version not at once
            self.epoch(1)
            if self.run.frozen == self.depth:
                break
        assert self.run.frozen == self.depth, "it freezes soon"
        if self._kind == FLOOR:
            self._answer_for_nothing(self.run)

    @torch.no_grad()
    def _answer_for_nothing(self, run: egeria.Run) -> None:
        """Let the frozen front give the same answers to all batches."""
        answers: dict[nn.Module, Any] = {}
        names = [name for module in run.modules[: self.depth] for name in module.submodules]
        roots = [self.model.get_submodule(name) for name in names]
        handles = [root.register_forward_hook(lambda root, _, output: answers.update({root: output})) for root in roots]
        self._loss(next(iter(self.loader)))
        for handle in handles:
            handle.remove()
        for root in roots:
            vars(root)["forward"] = partial(_answer, answers[root])

    def _loss(self, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._autocast):
            return self._subject.loss(self._called, batch)

    def epoch(self, most_steps: int | None = None) -> None:
        """Train for one epoch, with random numbers of its own: dropout is that of the other ways."""
        torch.set_rng_state(self._random_state)
        self.model.train()
        if isinstance(self.loader.sampler, egeria.ShardSampler):
            self.loader.sampler.set_epoch(next(self._epochs))
        for batch in itertools.islice(self.loader, most_steps):
            loss = self._loss(batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.run is not None:
                self.run.step(loss)
        self._random_state = torch.get_rng_state()

    def lap(self, *, warm: bool) -> dict[str, float]:
        """Train for one epoch; return its CPU and wall-clock seconds."""
        if not warm:
            self._drop_pages()
        began_cpu, began = time.process_time(), time.perf_counter()
        self.epoch()
        return {"cpu_s": time.process_time() - began_cpu, "wall_s": time.perf_counter() - began}

    def _drop_pages(self) -> None:
        """Let what is stored be on the disk only, also in a file without a name."""
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if str(entry.readlink()).startswith(str(self.folder)):
                    os.fdatasync(int(entry.name))
                    os.posix_fadvise(int(entry.name), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> dict[str, Any]:
        """End the run; return what the cache decided and served."""
        if self.run is None:
            return {}
        self.run.close()
        if dist.is_initialized() and dist.get_rank():
            return {}  # the first process writes the journal
        journal = read_journal(self.folder)
        decided = next((event for event in reversed(journal.of("cache")) if event["boundary"]), None)
        used = journal.last("cache_used")
        names = ("hits", "misses", "repeats", "size_bytes", "stall_s", "bytes_read", "thread_cpu_s")
        return {
            "mode": decided["mode"] if decided else "computed",
            "reason": decided["reason"] if decided else "",
            "used": {name: used[name] for name in names if name in used} if used else {},
        }


def _answer(answer: Any, *_args: Any, **_named: Any) -> Any:
    return answer


def measure(subject: Subject, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train all ways in turn; return the laps of each, the first of which fills the store, and what the cache did."""
    autocast = options.precision == "bf16"
    ways = [Way(subject, 0, PLAIN, autocast, folder)]
    ways += [Way(subject, depth, kind, autocast, folder) for depth in subject.depths for kind in subject.kinds]
    for way in ways:
        way.epoch()
        way.freeze()
    laps: dict[str, list[dict[str, float]]] = {way.name: [] for way in ways}
    for index in range(1 + options.rounds):
        turn = index % len(ways)
        for way in ways[turn:] + ways[:turn]:
            laps[way.name].append(way.lap(warm=options.warm))
    found = {way.name: {"laps": laps[way.name], **way.close()} for way in ways}
    by_name = {way.name: way.model.state_dict() for way in ways}
    for depth in subject.depths:
        computed = by_name[f"depth {depth}, computed"]
        for kind in ("disk", "memory"):
            name = f"depth {depth}, {kind}"
            found[name]["same_weights"] = all(torch.equal(by_name[name][key], computed[key]) for key in computed)
    return found


def table(found: dict[str, Any]) -> str:
    """Return the table of a subject."""
    header = (
        "way",
        "CPU % of plain (quartiles)",
        "wall %",
        "first epoch CPU %",
        "hits %",
        "weights as computed",
        "mode",
    )
    plain, lines = found[PLAIN]["laps"], []
    for name, entry in found.items():
        first, *rest = entry["laps"]
        ratios = [[lap[clock] / base[clock] for lap, base in zip(rest, plain[1:], strict=True)] for clock in first]
        used = entry.get("used") or {}
        served = f"{100 * used['hits'] / max(1, used['hits'] + used['misses']):.0f}" if used else ""
        same = {True: "yes", False: "no", None: ""}[entry.get("same_weights")]
        filling = f"{100 * first['cpu_s'] / plain[0]['cpu_s']:.0f}"
        told = f"{entry['mode']}: {entry['reason']}" if entry.get("reason") else ""
        lines.append((name, *map(_quartiles, ratios), filling, served, same, told))
    rows = [header, ["---"] * len(header), *lines]  # nothing of the library's is imported that others may not have
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"{100 * middle:.1f} ({100 * low:.1f} - {100 * high:.1f})"


def order(dataset: Any) -> dict[str, Any]:
    """Return the arguments of a loader that shuffle a data set, among processes where there are several."""
    if dist.is_initialized():
        return {"sampler": egeria.ShardSampler(dataset, shuffle=True, seed=1, drop_last=True)}
    return {"shuffle": True, "generator": torch.Generator().manual_seed(1)}


def residual_net(data: Path | None, samples: int) -> Subject:
    """Return ResNet-20 on CIFAR-10 without augmentation, or on noise of that shape."""
    generator = torch.Generator().manual_seed(0)
    if data is None:
        images = torch.randint(0, 256, (samples, 3, 32, 32), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (samples,), generator=generator)
    else:
        sheets = [f"data_batch_{index}" for index in range(1, 1 + -(-samples // 10000))]
        images, labels = (tensor[:samples] for tensor in load(data, sheets))
    layout = torch.channels_last
    dataset = Cifar10(images, labels)
    loader = partial(
        DataLoader,
        dataset,
        batch_size=128,
        drop_last=True,
        collate_fn=lambda batch: (batch[0].contiguous(memory_format=layout), batch[1]),
    )
    return Subject(
        build=lambda: cifar_resnet(20).to(memory_format=layout),
        loader=lambda: loader(**order(dataset)),
        loss=lambda network, batch: functional.cross_entropy(network(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4),
        depths=(1, 2),
    )


def bert(samples: int, *, mixed: bool = False) -> Subject:
    """Return an encoder of six layers of BERT's width with a head for two classes, on 128 random words a sample.

    Args:
        samples: of an epoch.
        mixed: on 8 to 128 words a sample, padded to the longest of their batch.
    """
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 - takes seconds

    config = BertConfig(num_hidden_layers=6)
    words = torch.randint(1000, config.vocab_size, (samples, 128), generator=torch.Generator().manual_seed(0))
    least = 8 if mixed else 128
    lengths = torch.randint(least, 129, (samples,), generator=torch.Generator().manual_seed(2)).tolist()
    rows: Any = [(row[:length], index % 2) for index, (row, length) in enumerate(zip(words, lengths, strict=True))]

    def collate(batch: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
        padded = nn.utils.rnn.pad_sequence([row for row, _ in batch], batch_first=True)
        labels = torch.tensor([label for _, label in batch])
        return {"input_ids": padded, "attention_mask": (padded != 0).long(), "labels": labels}

    return Subject(
        build=lambda: BertForSequenceClassification(config),
        loader=lambda: DataLoader(rows, batch_size=8, collate_fn=collate, **order(rows)),
        loss=lambda network, batch: network(**batch).loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-5),
        depths=(3,),
        kinds=[kind for kind in KINDS if not (mixed and kind == FLOOR)],  # one answer has one length
    )


def main() -> None:
    """Measure and print; with `--record` keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="CIFAR-10, as examples/cifar10.py reads it (default: noise)")
    parser.add_argument("--subjects", default="resnet20,bert")
    parser.add_argument("--samples", type=int, default=2048, help="of an epoch of the residual net")
    parser.add_argument("--bert-samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--directory", type=Path, help="for the stores, on the disk to measure (default: a temporary)")
    parser.add_argument("--warm", action="store_true", help="leave what is stored in the page cache")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    subjects = {
        "resnet20": lambda: residual_net(options.data, options.samples),
        "bert": lambda: bert(options.bert_samples),
        "bert-mixed": lambda: bert(options.bert_samples, mixed=True),
    }
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    found, texts = {}, [f"Stored activations come from {'the page cache' if options.warm else 'the disk'}.", ""]
    for name in options.subjects.split(","):
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            found[name] = measure(subjects[name](), options, Path(folder))
        if is_first:
            texts += [f"## {name}, {options.precision}", "", table(found[name]), ""]
            print("\n".join(texts[-4:]), flush=True)
    if options.record and is_first:
        options.record.mkdir(parents=True, exist_ok=True)
        kept = {"subjects": found, "made_with": describe_circumstances(torch.device("cpu"))}
        (options.record / "results.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        (options.record / "tables.md").write_text("\n".join(texts), encoding="utf-8")


if __name__ == "__main__":
    main()
