"""What freezing could save in a training, measured on a copy of it: `egeria.advise`."""

from __future__ import annotations

import copy
import itertools
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria.advice.advice import Advice, DepthCost
from egeria.advice.instruments import Iteration, Kept, Laps, Marks, is_cuda, storage_of
from egeria.advice.source import Source
from egeria.config import Config
from egeria.errors import ConfigError
from egeria.events import Declined, FaultCaught
from egeria.journal import read_journal
from egeria.layers.copies import copies_of_computed
from egeria.layers.undisturbed import kept_random_state
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
    source = Source(unwrap_loader(loader))
    with kept_random_state(model), source.kept_generators(), _quiet():
        batches, repeats = source.take(NUM_BATCHES), source.repeats()
        held_bytes = _accelerator_bytes(model)
        twin, twins = _copied(model, optimizers)
        training = _CopyInTraining(twin, twins, batches, loss or _own_loss, held_bytes)
        with tempfile.TemporaryDirectory() as folder:
            modules, costs, obstacles = training.measure(settings, Path(folder), rounds)
        evaluation_s = None
        if evaluate is not None:
            laps = Laps(twin)
            evaluate(twin)
            laps.lap()
            (evaluation_s,) = laps.seconds
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
        self._own = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._seen: dict[int, list[Iteration]] = {}
        self._memory: dict[int, tuple[int, int, int]] = {}
        """By depth, the bytes of activations, gradients and optimizer state."""
        self._marks: Marks | None = None
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
            Marks(self._model, modules) as self._marks,
        ):
            for place in range(total):
                is_settled = place % each >= SETTLING
                found = self._iterate(run, counts_memory=not is_settled)
                if is_settled and found.depth in self._memory:
                    self._seen.setdefault(found.depth, []).append(found)
        costs = tuple(self._cost(depth) for depth in sorted(self._seen))
        return tuple(module.name for module in modules), costs, _obstacles(folder)

    @contextmanager
    def _attached(self, settings: Config, folder: Path, policy: dict[str, Any], total_steps: int) -> Iterator[Run]:
        table = settings.to_dict()
        table["policy"] = {**table["policy"], **policy}
        table["plasticity"] = {**table["plasticity"], "interval_steps": SETTLING + TIMED}
        table["freezing"] = {**table["freezing"], "enabled": True, "landing": "none"}
        table["cache"] = {**table["cache"], "enabled": False}
        with attach(self._model, self._optimizers, directory=folder, total_steps=total_steps, config=table) as run:
            yield run

    def _iterate(self, run: Run, *, counts_memory: bool = False) -> Iteration:
        """Make one iteration as a loop would."""
        depth = run.frozen
        batch = self._first if counts_memory else next(self._batches)  # batches may differ in size
        kept = Kept(self._own) if counts_memory else None
        if self._marks is not None:
            self._marks.begin()
        laps = Laps(self._model)
        try:
            with kept or nullcontext():
                loss = self._loss(self._model, batch)
            laps.lap()
            loss.backward()  # type: ignore[no-untyped-call]
            laps.lap()
            for optimizer in self._optimizers:
                optimizer.step()
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            laps.lap()
        except Exception as error:
            raise ConfigError(
                f"An iteration on the copy must run as in the loop: loss(model, batch), backward, step; found "
                f"{type(error).__name__}: {error}. Pass loss=..., which does what the loop does before loss.backward()."
            ) from error
        run.step(loss)
        self.num_iterations += 1
        if kept is not None:
            self._memory[depth] = (kept.num_bytes, *self._trained_bytes())
        forward_s, backward_s, optimizer_s = laps.seconds
        prefix_s, stored = self._marks.prefix(depth) if self._marks is not None else (None, None)
        return Iteration(depth, forward_s, backward_s, optimizer_s, laps.cpu_s, prefix_s, stored, laps.peak_bytes)

    def _trained_bytes(self) -> tuple[int, int]:
        """Return the bytes of gradients and optimizer state of what trains now."""
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        states = (optimizer.state.get(parameter, {}) for optimizer in self._optimizers for parameter in trained)
        return _num_bytes(trained), sum(_num_bytes(state.values()) for state in states)

    def _cost(self, depth: int) -> DepthCost:
        seen = self._seen[depth]
        prefixes = [entry.prefix_s for entry in seen if entry.prefix_s is not None]
        peaks = [entry.peak_bytes - self._held_bytes for entry in seen if entry.peak_bytes is not None]
        activation_bytes, gradient_bytes, optimizer_bytes = self._memory[depth]
        return DepthCost(
            depth=depth,
            forward_s=statistics.median(entry.forward_s for entry in seen),
            backward_s=statistics.median(entry.backward_s for entry in seen),
            optimizer_s=statistics.median(entry.optimizer_s for entry in seen),
            cpu_s=statistics.median(entry.cpu_s for entry in seen),
            prefix_s=statistics.median(prefixes) if prefixes else None,
            activation_bytes=activation_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=optimizer_bytes,
            peak_bytes=max(peaks) if peaks else None,
            stored_bytes=next((entry.stored_bytes for entry in seen if entry.stored_bytes), None),
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what runs on the copy tell to themselves: it is no news of the user's training."""
    logger = logging.getLogger("egeria")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)


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


def _num_bytes(values: Iterable[Any]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def _accelerator_bytes(model: nn.Module) -> int:
    return torch.cuda.memory_allocated() if is_cuda(model) else 0
