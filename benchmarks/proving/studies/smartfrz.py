"""Trains the predictor of the policy 'smartfrz': plain trainings are watched, labelled afterwards, and learned from.

A layer module at the end of an interval is labelled "freeze" where its likeness to the trained network, by linear CKA,
is high and has stayed as it is for some intervals. The trained network is known afterwards only, and on networks that
are trained for this; the predictor is then asked about others.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.proving.catalogue import find_workloads
from benchmarks.proving.errors import RefusedError
from benchmarks.proving.running.execution import build
from benchmarks.proving.running.training import train_epoch
from benchmarks.proving.studies.oracle import Survey, survey
from benchmarks.proving.studies.posthoc import Probe
from benchmarks.workloads.workload import Training
from egeria.plasticity import linear_cka_distance
from egeria.smartfrz import NUM_SNAPSHOTS, NUM_WEIGHTS, FreezePredictor, WeightHistory

NUM_INTERVALS = 20
"""Of a training, as a run of the policy has."""
RATE, DECAY, BATCH = 1e-3, 1e-5, 32
"""AdamW of the predictor, as in the paper, and its batches."""


@dataclass(frozen=True, kw_only=True)
class Labelling:
    """When to freeze, by what is known afterwards."""

    span: int = 3
    """Intervals up to this one over which likeness must have stayed: an eighth of the training, as 20 epochs of 160."""
    most_variance: float = 1e-4
    """Of likeness over these; the paper's."""
    least_cka: float = 0.3
    """That likeness must have; the paper's."""

    def label(self, cka: Sequence[float]) -> list[bool]:
        """Return for each interval of one layer module whether it might freeze at its end."""
        return [
            place + 1 >= self.span
            and cka[place] > self.least_cka
            and statistics.pvariance(cka[place + 1 - self.span : place + 1]) < self.most_variance
            for place in range(len(cka))
        ]


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One plain training, by interval and layer module; the last layer module, which never freezes, is left out."""

    workload: str
    seed: int
    windows: Tensor
    """[W, L, `NUM_SNAPSHOTS`, `NUM_WEIGHTS`] float32."""
    cka: Tensor
    """[W, L], likeness to the network at the end of the training."""

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(".begun")
        save_file(
            {"windows": self.windows, "cka": self.cka},
            begun,
            metadata={"workload": self.workload, "seed": str(self.seed)},
        )
        begun.replace(path)

    @classmethod
    def load(cls, path: Path) -> Watched:
        """Return what was saved."""
        with safe_open(path, framework="pt") as file:
            told = file.metadata()
            return cls(
                workload=told["workload"],
                seed=int(told["seed"]),
                windows=file.get_tensor("windows"),
                cka=file.get_tensor("cka"),
            )


@dataclass
class _Watcher:
    """Stands where a run of egeria would: takes note of each step, and of the weights at the end of each interval."""

    model: nn.Module
    modules: Sequence[Any]
    interval_steps: int
    windows: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._history = WeightHistory(self.model)
        self._steps = 0

    def step(self, _loss: Tensor) -> None:
        self._history.end_step()
        self._steps += 1
        if self._steps % self.interval_steps == 0 and len(self.windows) < NUM_INTERVALS:
            found = self._history.windows(self.modules)
            blank = torch.full((NUM_SNAPSHOTS, NUM_WEIGHTS), torch.nan)
            self.windows.append(torch.stack([blank if window is None else window for window in found]))
            self.states.append({name: values.clone() for name, values in self.model.state_dict().items()})


def watch(training: Training, known: Survey, workload: str, seed: int, told: Callable[[str], object]) -> Watched:
    """Train plainly, and watch.

    Args:
        training: new.
        known: of the network.
        workload: its name.
        seed: of the training.
        told: called after each epoch.

    Raises:
        RefusedError: it has too few steps.
    """
    num_steps = len(training.loader) * training.num_epochs
    if num_steps < NUM_SNAPSHOTS:
        raise RefusedError(
            f"{workload} must have {NUM_SNAPSHOTS} steps, one for each snapshot, found {num_steps}. Take a larger tier."
        )
    interval_steps = max(NUM_SNAPSHOTS, num_steps // NUM_INTERVALS)  # as `choose_interval` has it for the policy
    modules = [SimpleNamespace(**module) for module in known.modules[:-1]]
    watcher = _Watcher(training.model, modules, interval_steps)
    for epoch in range(1, training.num_epochs + 1):
        for _, loss, is_end in train_epoch(training, watcher):
            if is_end:
                told(f"{workload}, seed {seed}: epoch {epoch}/{training.num_epochs}, loss {loss:.3f}")
    trained = {name: values.clone() for name, values in training.model.state_dict().items()}
    probe = Probe(training, [module.tap for module in modules])
    at_end = [entry.rows for entry in probe.read(trained)]
    cka = [
        [
            1 - float(linear_cka_distance(entry.rows, rows))
            for entry, rows in zip(probe.read(state), at_end, strict=True)
        ]
        for state in watcher.states
    ]
    return Watched(workload=workload, seed=seed, windows=torch.stack(watcher.windows), cka=torch.tensor(cka))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A training that is to be watched."""

    workload: str
    modules: Sequence[str]
    """In which it is looked for beside the registry."""
    data: Path
    tier: str
    seed: int
    device: torch.device
    kept: Path
    """Where what was seen is kept."""

    def make(self) -> None:
        """Watch it, in one thread."""
        torch.set_num_threads(1)
        ((_, workload),) = find_workloads([self.workload], self.modules)
        before, training = (build(workload, self.data, self.tier, self.seed, self.device) for _ in range(2))
        watch(training, survey(before), self.workload, self.seed, partial(print, flush=True)).save(self.kept)


def watch_all(wanted: Sequence[Wanted], jobs: int) -> None:
    """Watch trainings, as many at a time as there are `jobs`, in processes of their own."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as workers:
        try:
            for _ in workers.map(Wanted.make, wanted):
                pass
        except BaseException:  # nothing is to outlive us, nor to be waited for
            workers.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Windows [N, `NUM_SNAPSHOTS`, `NUM_WEIGHTS`] with labels [N], 1 for "freeze"."""

    windows: Tensor
    labels: Tensor

    @classmethod
    def of(cls, found: Sequence[Watched], labelling: Labelling) -> Examples:
        """Return all that can be learned from; windows of what has no weights that train are left out."""
        labels = [
            torch.tensor([labelling.label(column) for column in entry.cka.T.tolist()]).T.reshape(-1) for entry in found
        ]
        windows = torch.cat([entry.windows.flatten(0, 1) for entry in found])
        is_whole = windows.isfinite().flatten(1).all(1)
        return cls(windows=windows[is_whole], labels=torch.cat(labels).long()[is_whole])

    @property
    def share(self) -> float:
        """Of "freeze" among the labels."""
        return float(self.labels.float().mean())


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a predictor did on examples that it was not trained on."""

    right: float
    """Share of all that it was right of."""
    right_of_freeze: float
    right_of_train: float
    """The same of each label; NaN where there is none."""
    common: float
    """Share that whoever always says what is more common would be right of."""
    num_examples: int

    @property
    def balanced(self) -> float:
        """Mean over the labels: 0.5 for whoever always says the same."""
        return (self.right_of_freeze + self.right_of_train) / 2


def fit(examples: Examples, *, seed: int, epochs: int) -> FreezePredictor:
    """Train a predictor.

    Which of the weights of a layer stands at which place means nothing, nor does the sign of all: both are drawn anew
    for each example and epoch, which makes the few examples more.
    """
    torch.manual_seed(seed)
    predictor = FreezePredictor()
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=RATE, weight_decay=DECAY)
    for _ in range(epochs):
        for places in torch.randperm(len(examples.labels)).split(BATCH):
            logits = predictor(_shuffled(examples.windows[places]))
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits, examples.labels[places]).backward()
            optimizer.step()
    return predictor.eval()


@dataclass(frozen=True)
class Threshold:
    """Freezes what moved little in the interval: the least that a predictor must be better than."""

    most: float
    """Of the norm of the difference between the first and the last snapshot, as a share of that of the last."""

    @classmethod
    def fit(cls, examples: Examples) -> Threshold:
        """Return the one that is right of most examples."""
        moved, order = _movements(examples.windows).sort()
        freezes = examples.labels[order].float()
        right = freezes.cumsum(0) + (1 - freezes).sum() - (1 - freezes).cumsum(0)
        return cls(float(moved[right.argmax()]))

    def score(self, windows: Tensor) -> list[float]:
        """Return 1 for "freeze" and 0 for "train"."""
        return [float(moved <= self.most) for moved in _movements(windows)]


def _movements(windows: Tensor) -> Tensor:
    last = windows[:, -1]
    sizes = (last - last.mean(dim=1, keepdim=True)).norm(dim=1)
    return (windows[:, 0] - last).norm(dim=1) / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)


def judge(predictor: FreezePredictor | Threshold, examples: Examples) -> Verdict:
    """Ask a predictor about examples that it has not seen."""
    scores = torch.tensor([score for part in examples.windows.split(256) for score in predictor.score(part)])
    says, labels = (scores > 0.5).long(), examples.labels
    right = (says == labels).float()
    return Verdict(
        right=float(right.mean()),
        right_of_freeze=float(right[labels == 1].mean()),
        right_of_train=float(right[labels == 0].mean()),
        common=max(examples.share, 1 - examples.share),
        num_examples=len(labels),
    )


def without_each(found: Sequence[Watched]) -> Iterator[tuple[str, list[Watched], list[Watched]]]:
    """Yield for each workload the trainings of the others, and its own; nothing where there are no others."""
    names = dict.fromkeys(entry.workload for entry in found)
    for name in names if len(names) > 1 else ():
        yield (
            name,
            [entry for entry in found if entry.workload != name],
            [entry for entry in found if entry.workload == name],
        )


def _shuffled(windows: Tensor) -> Tensor:
    places = torch.rand(len(windows), windows.shape[2]).argsort(dim=1)
    signs = 2.0 * torch.randint(0, 2, (len(windows), 1, 1)) - 1
    return signs * windows.gather(2, places[:, None].expand_as(windows))
