"""What freezing could save in a training, measured on a copy of it: `egeria.advise`."""

from __future__ import annotations

import copy
import gc
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from egeria import dist
from egeria.advice.advice import Advice
from egeria.advice.instruments import DeviceClock, devices_of
from egeria.advice.rehearsal import NUM_BATCHES, CopyInTraining, Loss
from egeria.advice.source import Source, Witness
from egeria.config import Config
from egeria.errors import ConfigError
from egeria.layers.copies import copies_of_computed
from egeria.layers.shards import is_compiled
from egeria.random_state import kept_generators, kept_random_state
from egeria.session.checks import read_config, unwrap_loader

NUM_ROUNDS = 4
OWN_STEP = "step"
"""Of an optimizer, that a scheduler may have replaced: bound to the original."""


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
    """Measure what freezing could save in a training, by a few dozen to 132 iterations of it on a
    copy.

    The copy freezes ever more of its front layer modules, as a run would, several times over.
    Model, optimizer, random state and the order of the loader are afterwards what they were; so are
    generators that the loader, its data set, `loss` and `evaluate` lead to. What else these two
    write to, such as a `GradScaler` or a list that a hook of the model fills, is theirs, as is what
    the data set does when it is read. On CUDA the peak of memory is set back.

    Args:
        model: as the loop would train it, on its device; not compiled, and no wrapper of several
            processes.
        optimizer: the optimizer, or all of them. Memory for a second model and a second optimizer
            state is needed.
        loader: a `DataLoader`, or a list of batches. Samples are read in this process.
        loss: called with the model and a batch, returns the loss; autocast and the way to the
            device belong in it. It must use the model that it is given. None:
            `model(**batch).loss`, as models of Hugging Face have it.
        evaluate: called with the model, does what one evaluation of the loop does. None: not
            counted.
        iterations_per_evaluation: how many iterations the loop makes between two of these.
        config: the settings that the run would have: how the model is cut counts.
        rounds: how often each depth is measured.

    Raises:
        ConfigError: an argument is outside its contract, or an iteration on the copy failed.
    """
    settings = read_config(config, "inline", None)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    _check(model, optimizers, rounds, evaluate, iterations_per_evaluation)
    source, witness = Source(unwrap_loader(loader)), Witness(model, optimizers)

    def measured() -> Advice:
        batches, repeats = source.take(NUM_BATCHES), source.repeats()
        training = _copy_in_training(model, optimizers, batches, loss or _own_loss, witness)
        with tempfile.TemporaryDirectory() as folder:
            modules, costs, obstacles = training.measure(settings, Path(folder), rounds)
        return Advice(
            modules=modules,
            costs=costs,
            num_iterations=training.num_iterations,
            evaluation_s=None if evaluate is None else _evaluation_s(evaluate, training.model),
            iterations_per_evaluation=iterations_per_evaluation,
            num_samples=source.num_samples,
            reading_s=source.reading_s,
            has_workers=source.has_workers,
            repeats=repeats,
            obstacles=obstacles,
        )

    try:
        with kept_random_state(model), kept_generators(loader, loss, evaluate), _quiet():
            return measured()
    finally:
        if witness.is_touched:
            witness.put_right()
        # a run and its parts know each other: the copy would stay until the next collection
        gc.collect()


def _copy_in_training(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    batches: Sequence[Any],
    loss: Loss,
    witness: Witness,
) -> CopyInTraining:
    held_bytes = sum(map(torch.cuda.memory_allocated, devices_of(model)))
    twin, twins = _copied(model, optimizers)
    return CopyInTraining(
        model=twin,
        optimizers=twins,
        batches=batches,
        loss=loss,
        held_bytes=held_bytes,
        witness=witness,
    )


def _evaluation_s(evaluate: Callable[[nn.Module], Any], model: nn.Module) -> float:
    """Return the seconds that an evaluation of a copy takes."""
    clock = DeviceClock(devices_of(model))
    begin = clock.now()
    try:
        evaluate(model)
    except Exception as error:
        raise ConfigError(
            f"evaluate(model) must run on the copy as in the loop, found {type(error).__name__}: "
            f"{error}. "
            f"Correct it, or leave it out."
        ) from error
    return clock.seconds(begin, clock.now())


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
    model: nn.Module,
    optimizers: Sequence[Any],
    rounds: Any,
    evaluate: Any,
    iterations_per_evaluation: Any,
) -> None:
    if not torch.is_grad_enabled():
        raise ConfigError(
            "advise trains a copy, found gradients switched off. Call it outside of "
            "torch.no_grad()."
        )
    _check_model(model)
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise ConfigError(
            f"optimizer must be a torch.optim.Optimizer, or all of them, found {optimizers!r}. "
            "Pass what "
            f"the loop steps."
        )
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ConfigError(
            "optimizer must step without a closure, found LBFGS. Nothing can freeze under it."
        )
    _check_count("rounds", rounds)
    if (evaluate is None) != (iterations_per_evaluation is None):
        raise ConfigError(
            "evaluate and iterations_per_evaluation belong together, found one of them. Pass "
            "both, so that the share "
            "of evaluations in the training time is known, or neither."
        )
    if evaluate is not None:
        _check_count("iterations_per_evaluation", iterations_per_evaluation)


def _check_count(name: str, given: Any) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ConfigError(
            f"{name} must be a whole number of at least 1, found {given!r}. Correct it or leave "
            "it out."
        )


def _check_model(model: nn.Module) -> None:
    wrapper = next(
        (part for part in type(model).__mro__ if part.__module__.startswith("torch.nn.parallel")),
        None,
    )
    if not isinstance(model, nn.Module) or wrapper is not None or dist.world_size() > 1:
        jobs = f" in a job of {dist.world_size()} processes" if dist.world_size() > 1 else ""
        raise ConfigError(
            "model must be a torch.nn.Module without a wrapper of several processes, in a "
            "process of its own; found "
            f"{type(model).__name__}{jobs}. Ask in a script without the others; what several save "
            "together is a little "
            f"more."
        )
    if is_compiled(model) or any(hasattr(part, "_orig_mod") for part in model.modules()):
        raise ConfigError(
            f"model must not be compiled, found a {type(model).__name__} that is, or has parts "
            "that are. Ask before "
            f"torch.compile or model.compile(): a copy would be compiled again for each depth."
        )
    if kinds := {parameter.device.type for parameter in model.parameters()} - {"cpu", "cuda"}:
        raise ConfigError(
            f"advise can time the CPU and CUDA, found parameters on {', '.join(sorted(kinds))}. "
            "Move the model, or "
            f"compare a run by 'static' with one without egeria."
        )


def _copied(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
    """Return copies, the optimizers for the parameters of the model's copy."""
    memo = copies_of_computed(model)
    try:
        twin, twins = copy.deepcopy((model, list(optimizers)), memo)
        for optimizer, other in zip(optimizers, twins, strict=True):
            # An optimizer copies what torch knows of it; a subclass may have attributes of its own.
            left_out = vars(optimizer).keys() - vars(other).keys() - {OWN_STEP}
            vars(other).update(
                {name: copy.deepcopy(vars(optimizer)[name], memo) for name in left_out}
            )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "advise needs memory for a second model and optimizer state beside the first, found "
            f"{error}. Ask on a "
            f"machine with more, or with a smaller model of the same kind."
        ) from error
    except Exception as error:
        raise ConfigError(
            "model and optimizer must be such as copy.deepcopy copies, found "
            f"{type(error).__name__}: {error}. "
            f"Ask before they are sharded or used in a forward pass that keeps its graph."
        ) from error
    return twin, twins


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss that a model of Hugging Face computes by itself."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"a batch that is {type(batch).__name__}, where model(**batch) takes a dictionary "
            "with labels"
        )
    device = next(model.parameters()).device
    loss = getattr(model(**{name: _to(part, device) for name, part in batch.items()}), "loss", None)
    if loss is None:
        raise TypeError("an output without a loss")
    return cast(Tensor, loss)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
