"""What freezing could save in a training, measured on a copy of it: `egeria.advise`."""

from __future__ import annotations

import copy
import html
import itertools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from egeria import tree
from egeria.config import Config
from egeria.config.checks import check, read_timetable, timetable
from egeria.errors import ConfigError
from egeria.events import Declined, FaultCaught
from egeria.journal import read_journal
from egeria.layers.copies import copies_of_computed
from egeria.layers.modules import LayerModule
from egeria.layers.undisturbed import kept_random_state
from egeria.report.wording import duration, mebibytes, percent
from egeria.session import Run, attach
from egeria.session.checks import read_config, unwrap_loader

Loss = Callable[[nn.Module, Any], Tensor]
NUM_BATCHES = 8
"""Different batches that the iterations take in turn."""
SETTLING, TIMED = 1, 3
"""Iterations at each depth in each round: first those in which the change settles, then those that are timed."""
NUM_ROUNDS = 4
MOST_DEPTHS = 8
"""Depths that are measured; of a model with more layer modules the others lie between these."""
BAR = 20
"""Length of the longest bar of the table, in characters."""
TEXT_COLUMNS = ("up to", "")
"""Those of the table that are no numbers; the one without a name has the bars."""
LEAST_SAVING = 0.03
"""Share of the training time that freezing half of the model for half of the training must save to be worth a try."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthCost:
    """What one iteration costs with the front `depth` layer modules frozen; medians of those that were timed."""

    depth: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    """What `step` and `zero_grad` take."""
    cpu_s: float
    """CPU seconds of the process."""
    prefix_s: float | None
    """Of the forward pass, what lies in the frozen front, which a cache would skip; None where it was not seen."""
    activation_bytes: int | None
    """What the forward pass keeps for the backward pass, without parameters; None where it cannot be counted."""
    gradient_bytes: int
    optimizer_bytes: int
    """Of the parameters that still train."""
    peak_bytes: int | None
    """Most memory that was in use on the accelerator during an iteration; None on the CPU."""
    stored_bytes: int | None
    """What the frozen front puts out for one sample: what a cache would keep of it."""

    @property
    def iteration_s(self) -> float:
        """Wall-clock seconds of the whole iteration."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def memory_bytes(self) -> int:
        """What an iteration needs beside the parameters: activations, gradients and optimizer state."""
        return (self.activation_bytes or 0) + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What freezing could save in a training. Shares are of its time, evaluations left out unless they were timed."""

    modules: tuple[str, ...]
    """The layer modules, front to back; the last never freezes."""
    costs: tuple[DepthCost, ...]
    """By depth, from none to as many as may freeze, as far as they were measured."""
    num_iterations: int
    evaluation_s: float | None
    """Of one evaluation; None where none was given."""
    iterations_per_evaluation: int | None
    num_samples: int | None
    """Of an epoch; None where nobody knows."""
    repeats: bool | None
    """Whether a sample is the same each time it is drawn, as a cache needs; None where that cannot be tried."""
    obstacles: tuple[str, ...]
    """What stands in the way, each with the way out."""

    def saving(self, schedule: str, *, cached_epochs: float = 0.0) -> float:
        """Return the share of the training time that a schedule would save.

        Args:
            schedule: as in `policy.schedule` without periods: "0.5:2 0.75:3" for two layer modules from half of the
                training on and three from three quarters on.
            cached_epochs: for how many epochs, of those with anything frozen, the front comes out of a cache; 0: none.

        Raises:
            ConfigError: the schedule is none.
        """
        check("schedule", schedule, timetable)
        moves = [(share, front.frozen) for share, front in read_timetable(schedule)]
        ends = [*(share for share, _ in moves[1:]), 1.0]
        spans = [(end - begin, depth) for (begin, depth), end in zip(moves, ends, strict=True)]
        plain = self._iteration_s(0) + self._evaluation_share_s
        saved = sum(length * (self._iteration_s(0) - self._iteration_s(depth)) for length, depth in spans)
        if cached_epochs:
            saved += sum(min(length, cached_epochs) * self._prefix_s(depth) for length, depth in spans)
        return saved / plain

    @property
    def half_saving(self) -> float:
        """Share of the time saved with the front half of the model, by time, frozen from half of the training on."""
        whole = self._iteration_s(0) - self._iteration_s(self.costs[-1].depth)
        halfway = (c.depth for c in self.costs if self._iteration_s(0) - c.iteration_s >= whole / 2)
        return self.saving(f"0.5:{next(halfway, 0)}") if self.costs[-1].depth else 0.0

    @property
    def is_worth_it(self) -> bool:
        """Whether freezing is worth a try here."""
        return self.half_saving >= LEAST_SAVING

    @property
    def verdict(self) -> str:
        """The advice in one or two sentences."""
        if not self.costs[-1].depth:
            return f"Not worth it: nothing can freeze. {' '.join(self.obstacles)}".strip()
        most = self.saving(f"0:{self.costs[-1].depth}")
        told = (
            f"With all that may freeze frozen an iteration takes {percent(most)} less time, and with the front half of "
            f"that from half of the training on, training takes {percent(self.half_saving)} less"
        )
        return f"Worth a try: {_lower(told)}." if self.is_worth_it else f"Not worth it: {_lower(told)}."

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        derived = {"half_saving": self.half_saving, "is_worth_it": self.is_worth_it, "verdict": self.verdict}
        return {**asdict(self), **derived}

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table: a row for each depth, below the names of the columns."""
        plain = self.costs[0]
        times = ("forward", "backward", "optimizer", "iteration")
        found: list[tuple[str, ...]] = [("frozen", "up to", *times, "", "saved", "memory", "with a cache")]
        for cost in self.costs:
            prefix_s = None if self.repeats is False or not cost.depth else cost.prefix_s
            found.append(
                (
                    f"{cost.depth}",
                    self.modules[cost.depth - 1] if cost.depth else "-",
                    *(f"{1000 * part:.1f} ms" for part in (cost.forward_s, cost.backward_s, cost.optimizer_s)),
                    f"{1000 * cost.iteration_s:.1f} ms",
                    "█" * round(BAR * cost.iteration_s / plain.iteration_s),
                    percent(1 - cost.iteration_s / plain.iteration_s),
                    mebibytes(cost.peak_bytes or cost.memory_bytes),
                    "-" if prefix_s is None else percent(1 - (cost.iteration_s - prefix_s) / plain.iteration_s),
                )
            )
        return found

    def notes(self) -> list[str]:
        """Return what is to be said below the table."""
        found = [self.verdict]
        if self.evaluation_s is not None:
            found.append(f"One evaluation takes {duration(self.evaluation_s)}, which freezing does not change.")
        stored = self.costs[-1].stored_bytes
        if self.repeats and stored and self.num_samples:
            found.append(f"A cache can work: samples repeat, and take {mebibytes(stored * self.num_samples)} at most.")
        elif self.repeats is False:
            found.append("No cache: a sample is another one each time it is drawn, as with random augmentation.")
        return [*found, *(f"In the way: {obstacle}" for obstacle in self.obstacles)]

    def __repr__(self) -> str:
        """Return the table and the advice as text."""
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(_aligned(*cell) for cell in zip(rows[0], row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, "", *self.notes()])

    def _repr_html_(self) -> str:
        head, *rows = [[html.escape(cell) for cell in row] for row in self.rows()]
        lines = [f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"]
        lines += [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes())
        return f"<table><caption>What freezing could save</caption>{''.join(lines)}</table>{notes}"

    @property
    def _evaluation_share_s(self) -> float:
        """Seconds of evaluation for each iteration."""
        return (self.evaluation_s or 0.0) / self.iterations_per_evaluation if self.iterations_per_evaluation else 0.0

    def _iteration_s(self, depth: int) -> float:
        return _between([(cost.depth, cost.iteration_s) for cost in self.costs], depth)

    def _prefix_s(self, depth: int) -> float:
        return _between([(cost.depth, cost.prefix_s or 0.0) for cost in self.costs], depth)


def _between(points: Sequence[tuple[int, float]], depth: int) -> float:
    """Return the value at a depth, on the straight line between those that were measured; the last holds for more."""
    for (before, low), (after, high) in itertools.pairwise(points):
        if depth <= after:
            return low + (high - low) * (depth - before) / (after - before)
    return points[-1][1]


def _aligned(column: str, cell: str, width: int) -> str:
    return cell.ljust(width) if column in TEXT_COLUMNS else cell.rjust(width)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def advise(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Any,
    *,
    loss: Loss | None = None,
    evaluate: Callable[[nn.Module], Any] | None = None,
    iterations_per_evaluation: int | None = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    rounds: int = NUM_ROUNDS,
) -> Advice:
    """Measure what freezing could save in a training, by some dozen iterations of it on a copy.

    The copy freezes ever more of its front layer modules, as a run would, several times over. Model, optimizer, random
    state and the order of the loader are afterwards what they were.

    Args:
        model: as the loop would train it, on its device; no wrapper of several processes.
        optimizer: the optimizer, or all of them. Memory for a second model and a second optimizer state is needed.
        loader: a `DataLoader`, or a list of batches. Samples are read in this process.
        loss: called with the model and a batch, returns the loss; autocast and the way to the device belong in it.
            None: `model(**batch).loss`, as models of Hugging Face have it.
        evaluate: called with the model, does what one evaluation of the loop does. None: not counted.
        iterations_per_evaluation: how many iterations the loop makes between two of these.
        config: the settings that the run would have: how the model is cut counts.
        rounds: how often each depth is measured.

    Raises:
        ConfigError: an argument is outside its contract, or an iteration on the copy failed.
    """
    settings = read_config(config, "inline", None)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    _check(model, optimizers, rounds, evaluate, iterations_per_evaluation)
    source = _Source(unwrap_loader(loader))
    with kept_random_state(model):
        batches, repeats = source.take(NUM_BATCHES), source.repeats()
        held_bytes = _accelerator_bytes(model)
        twin, twins = _copied(model, optimizers)
        training = _CopyInTraining(twin, twins, batches, loss or _own_loss, held_bytes)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            modules, costs, obstacles = training.measure(settings, Path(folder), rounds)
        evaluation_s = None if evaluate is None else _timed(lambda: evaluate(twin), twin)
    return Advice(
        modules=modules,
        costs=costs,
        num_iterations=training.num_iterations,
        evaluation_s=evaluation_s,
        iterations_per_evaluation=iterations_per_evaluation,
        num_samples=source.num_samples,
        repeats=repeats,
        obstacles=obstacles,
    )


class _CopyInTraining:
    """Trains a copy while its front freezes and thaws, and notes what each iteration takes."""

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], batches: Sequence[Any], loss: Loss, held_bytes: int
    ) -> None:
        self._model, self._optimizers, self._loss, self._held_bytes = model.train(), optimizers, loss, held_bytes
        self._first, self._batches = batches[0], itertools.cycle(batches)
        self._own = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._seen: dict[int, list[_Iteration]] = {}
        self._kept: dict[int, int | None] = {}
        self._marks: _Marks | None = None
        self.num_iterations = 0

    def measure(
        self, settings: Config, folder: Path, rounds: int
    ) -> tuple[tuple[str, ...], tuple[DepthCost, ...], tuple[str, ...]]:
        """Return the layer modules, what each depth costs, and what stood in the way."""
        with self._attached(settings, folder / "cut", {"name": "none"}, TIMED + SETTLING) as run:
            for _ in range(TIMED + SETTLING):  # the order in which layers run is known, and everything is warm
                self._iterate(run)
            modules = run.modules
        depths = _spread(max(0, len(modules) - 1))
        each = SETTLING + TIMED
        total = rounds * len(depths) * each
        moves = (f"{place * each / total!r}:{depth}" for place, depth in enumerate(depths * rounds))
        policy = {"name": "static", "schedule": " ".join(moves)}
        with (
            self._attached(settings, folder / "run", policy, total) as run,
            _Marks(self._model, modules) as self._marks,
        ):
            for place in range(total):
                measures = place // each // len(depths) == 0 and place % each == 0
                found = self._iterate(run, counts_memory=measures)
                if place % each >= SETTLING:
                    self._seen.setdefault(found.depth, []).append(found)
        costs = tuple(self._cost(depth, modules) for depth in sorted(self._seen))
        return tuple(module.name for module in modules), costs, _obstacles(folder)

    @contextmanager
    def _attached(self, settings: Config, folder: Path, policy: dict[str, Any], total_steps: int) -> Iterator[Run]:
        table = settings.to_dict()
        table["policy"] = {**table["policy"], **policy}
        table["plasticity"] = {**table["plasticity"], "interval_steps": SETTLING + TIMED}
        table["cache"] = {**table["cache"], "enabled": False}
        with attach(self._model, self._optimizers, directory=folder, total_steps=total_steps, config=table) as run:
            yield run

    def _iterate(self, run: Run, *, counts_memory: bool = False) -> _Iteration:
        """Make one iteration as a loop would."""
        depth = run.frozen
        batch = self._first if counts_memory else next(self._batches)  # batches may differ in size
        kept = _Kept(self._own) if counts_memory else None
        if self._marks is not None:
            self._marks.begin()
        clock = _Clock(self._model)
        try:
            with kept or _nothing():
                loss = self._loss(self._model, batch)
            clock.lap()
            loss.backward()  # type: ignore[no-untyped-call]
            clock.lap()
            for optimizer in self._optimizers:
                optimizer.step()
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            clock.lap()
        except Exception as error:
            raise ConfigError(
                f"An iteration on the copy must run as in the loop: loss(model, batch), backward, step; found "
                f"{type(error).__name__}: {error}. Pass loss=..., which does what the loop does before loss.backward()."
            ) from error
        run.step(loss)
        self.num_iterations += 1
        if kept is not None:
            self._kept[depth] = kept.num_bytes
        forward_s, backward_s, optimizer_s = clock.laps
        prefix_s, stored = self._marks.prefix(depth) if self._marks is not None else (None, None)
        return _Iteration(depth, forward_s, backward_s, optimizer_s, clock.cpu_s, prefix_s, stored, clock.peak_bytes)

    def _cost(self, depth: int, modules: Sequence[LayerModule]) -> DepthCost:
        seen = self._seen[depth]
        frozen = {id(self._model.get_parameter(name)) for module in modules[:depth] for name in module.parameters}
        trained = [p for p in self._model.parameters() if p.requires_grad and id(p) not in frozen]
        states = (optimizer.state.get(p, {}) for optimizer in self._optimizers for p in trained)
        prefixes = [entry.prefix_s for entry in seen if entry.prefix_s is not None]
        peaks = [entry.peak_bytes - self._held_bytes for entry in seen if entry.peak_bytes is not None]
        return DepthCost(
            depth=depth,
            forward_s=statistics.median(entry.forward_s for entry in seen),
            backward_s=statistics.median(entry.backward_s for entry in seen),
            optimizer_s=statistics.median(entry.optimizer_s for entry in seen),
            cpu_s=statistics.median(entry.cpu_s for entry in seen),
            prefix_s=statistics.median(prefixes) if prefixes else None,
            activation_bytes=self._kept.get(depth),
            gradient_bytes=sum(p.numel() * p.element_size() for p in trained),
            optimizer_bytes=sum(_num_bytes(state.values()) for state in states),
            peak_bytes=max(peaks) if peaks else None,
            stored_bytes=next((entry.stored_bytes for entry in seen if entry.stored_bytes), None),
        )


@dataclass(frozen=True, slots=True)
class _Iteration:
    """What one iteration took, in wall-clock seconds, CPU seconds and bytes."""

    depth: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    cpu_s: float
    prefix_s: float | None
    stored_bytes: int | None
    peak_bytes: int | None


class _Clock:
    """Times the laps of an iteration; waits for the accelerator at the end of each."""

    def __init__(self, model: nn.Module) -> None:
        self._is_cuda = _is_cuda(model)
        if self._is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.laps: list[float] = []
        self._cpu_s, self._last = time.process_time(), time.perf_counter()

    def lap(self) -> None:
        """End a lap."""
        if self._is_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.laps.append(now - self._last)
        self._last = now

    @property
    def cpu_s(self) -> float:
        """CPU seconds since the beginning."""
        return time.process_time() - self._cpu_s

    @property
    def peak_bytes(self) -> int | None:
        """Most memory in use on the accelerator since the beginning; None on the CPU."""
        return torch.cuda.max_memory_allocated() if self._is_cuda else None


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts what a forward pass keeps for the backward pass; a storage that several tensors share counts once."""

    def __init__(self, own: set[int]) -> None:
        self._found: dict[int, int] = {}
        self._own = own
        super().__init__(self._note, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        """Bytes so far, without those of the model's own tensors."""
        return sum(self._found.values())

    def _note(self, tensor: Tensor) -> Tensor:
        key = _key(tensor)
        if key not in self._own:
            self._found[key] = tensor.untyped_storage().nbytes()
        return tensor


class _Marks:
    """Notes when each layer module has put out its activation in a forward pass, and how large that is."""

    def __init__(self, model: nn.Module, modules: Sequence[LayerModule]) -> None:
        self._is_cuda = _is_cuda(model)
        self._stamps: dict[int, Any] = {}
        self._bytes: dict[int, int] = {}
        taps = [model.get_submodule(module.tap) for module in modules]
        self._handles = [tap.register_forward_hook(self._make_note(place)) for place, tap in enumerate(taps)]

    def __enter__(self) -> _Marks:
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self) -> None:
        """A forward pass begins."""
        self._stamps = {-1: self._now()}

    def prefix(self, depth: int) -> tuple[float | None, int | None]:
        """Return the seconds to the output of the front `depth` layer modules, and its bytes for one sample."""
        begin, end = self._stamps.get(-1), self._stamps.get(depth - 1)
        if not depth or begin is None or end is None:
            return (None if depth else 0.0), None
        seconds = begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin
        return seconds, self._bytes.get(depth - 1)

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _make_note(self, place: int) -> Callable[..., None]:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            self._stamps[place] = self._now()
            rows = tree.num_rows(output)
            if rows:
                self._bytes[place] = sum(part.numel() * part.element_size() for part in tree.leaves(output)) // rows

        return note


class _Source:
    """Takes batches of a loader without using it up, and without its workers."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._dataset: Any = loader.dataset if isinstance(loader, DataLoader) else None
        self._is_stream = isinstance(self._dataset, IterableDataset)
        self.num_samples: int | None = None
        if self._dataset is not None and not self._is_stream:
            with suppress(TypeError, NotImplementedError):  # a data set need not know its length
                self.num_samples = len(cast(Any, self._dataset))

    def take(self, count: int) -> list[Any]:
        """Return the first batches."""
        try:
            found = list(itertools.islice(self._batches(), count))
        except Exception as error:
            raise ConfigError(
                f"loader is a DataLoader whose samples can be read in this process, or a list of batches; found "
                f"{type(error).__name__}: {error}. Pass a list of a few batches."
            ) from error
        if not found:
            raise ConfigError("loader must have a batch at least, found none. Pass a list of a few batches.")
        return found

    def repeats(self) -> bool | None:
        """Return whether a sample is the same each time; None where it cannot be drawn by itself."""
        if self._loader_draws_batches or self.num_samples is None:
            return None
        places = range(min(3, self.num_samples))
        return all(_same(self._fetch([place]), self._fetch([place])) for place in places)

    def _batches(self) -> Iterable[Any]:
        loader = self._loader
        if not isinstance(loader, DataLoader):
            if loader is None or iter(loader) is loader:
                raise TypeError(f"{type(loader).__name__}, which reading would use up")
            return cast(Iterable[Any], loader)
        kept = {id(self._dataset): self._dataset}  # a copy of the sampler refers to the data set itself
        if self._is_stream:
            dataset = copy.deepcopy(self._dataset)
            return DataLoader(dataset, batch_size=loader.batch_size, collate_fn=loader.collate_fn)
        sampler = copy.deepcopy(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler, kept)
        return (loader.collate_fn(self._fetch(drawn)) for drawn in cast(Iterable[Any], sampler))

    @property
    def _loader_draws_batches(self) -> bool:
        """Whether the data set puts batches together, so that there is no single sample."""
        return isinstance(self._loader, DataLoader) and self._loader.batch_sampler is None

    def _fetch(self, drawn: Any) -> Any:
        if self._loader_draws_batches:
            return self._dataset[drawn]
        fetch = getattr(self._dataset, "__getitems__", None)
        return fetch(drawn) if callable(fetch) else [self._dataset[place] for place in drawn]


def _check(
    model: nn.Module, optimizers: Sequence[Any], rounds: Any, evaluate: Any, iterations_per_evaluation: Any
) -> None:
    wrapper = next((part for part in type(model).__mro__ if part.__module__.startswith("torch.nn.parallel")), None)
    if not isinstance(model, nn.Module) or wrapper is not None:
        raise ConfigError(
            f"model must be a torch.nn.Module without a wrapper of several processes, found {type(model).__name__}. "
            f"Ask in one process, before wrapping; what several save together is a little more."
        )
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise ConfigError(
            f"optimizer must be a torch.optim.Optimizer, or all of them, found {optimizers!r}. Pass what "
            f"the loop steps."
        )
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise ConfigError(
            f"rounds must be a whole number of at least 1, found {rounds!r}. Leave it out for {NUM_ROUNDS}."
        )
    if (evaluate is None) != (iterations_per_evaluation is None):
        raise ConfigError(
            "evaluate and iterations_per_evaluation belong together, found one of them. Pass both, so that the share "
            "of evaluations in the training time is known, or neither."
        )


def _copied(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
    """Return copies, the optimizers for the parameters of the model's copy."""
    try:
        twin, twins = copy.deepcopy((model, list(optimizers)), copies_of_computed(model))
    except Exception as error:
        raise ConfigError(
            f"model and optimizer must be such as copy.deepcopy copies, found {type(error).__name__}: {error}. "
            f"Ask before they are compiled, sharded or used in a forward pass that keeps its graph."
        ) from error
    return twin, twins


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a model of Hugging Face computes by itself."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch that is {type(batch).__name__}, where model(**batch) takes a dictionary with labels")
    device = next(model.parameters()).device
    loss = getattr(model(**{name: _to(part, device) for name, part in batch.items()}), "loss", None)
    if loss is None:
        raise TypeError("an output without a loss")
    return cast(Tensor, loss)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _spread(deepest: int) -> tuple[int, ...]:
    """Return the depths that are measured, from nothing to all that may freeze."""
    if deepest < MOST_DEPTHS:
        return tuple(range(deepest + 1))
    return tuple(sorted({round(deepest * place / (MOST_DEPTHS - 1)) for place in range(MOST_DEPTHS)}))


def _obstacles(folder: Path) -> tuple[str, ...]:
    """Return what journals say of what was declined or failed, each once."""
    found: dict[str, None] = {}
    for directory in sorted(folder.iterdir()):
        for event in read_journal(directory).events:
            if isinstance(event, Declined):
                found[f"{event.what}: {event.reason}."] = None
            elif isinstance(event, FaultCaught):
                found[f"{event.where} failed: {event.error}."] = None
    return tuple(found)


def _timed(action: Callable[[], Any], model: nn.Module) -> float:
    clock = _Clock(model)
    action()
    clock.lap()
    return clock.laps[0]


def _same(one: Any, other: Any) -> bool:
    """Return whether two samples are equal: all tensors and arrays, and whatever else is compared by value."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _num_bytes(values: Iterable[Any]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def _is_cuda(model: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in model.parameters())


def _accelerator_bytes(model: nn.Module) -> int:
    return torch.cuda.memory_allocated() if _is_cuda(model) else 0


@contextmanager
def _nothing() -> Iterator[None]:
    yield
