"""The random states of Python, numpy and torch: kept, seeded, compared."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What objects of the user's may hold to draw from.
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


@contextmanager
def kept_random_state(model: nn.Module) -> Iterator[None]:
    """Restore all random states after the block, on the CPU and the model's devices."""
    with ExitStack() as restores:
        for restore in restoring_all(model):
            restores.callback(restore)
        yield


def random_states() -> tuple[Any, ...]:
    """Return the states of Python, numpy and torch on the CPU."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_states(states: tuple[Any, ...]) -> None:
    """Go on from there, so that what draws random numbers draws the same ones again."""
    setters: tuple[Any, ...] = random.setstate, np.random.set_state, torch.set_rng_state
    for set_state, state in zip(setters, states, strict=True):
        set_state(state)


def seed_random_state(model: nn.Module, seed: int) -> None:
    """Seed Python, numpy and torch, on the CPU and the model's devices alone."""
    random.seed(seed)
    np.random.seed(seed)
    for generator in generators_of(model):
        generator.manual_seed(seed)


def random_fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Return a value that changes with every random number that Python, numpy or torch draw."""
    of_torch = [generator.get_state().numpy().tobytes() for generator in generators_of(model)]
    of_numpy: Any = np.random.get_state()
    return (random.getstate(), of_numpy[1].tobytes(), *of_numpy[2:], *of_torch)


def generators_of(model: nn.Module) -> list[torch.Generator]:
    """Return what torch draws from, on the CPU and on the accelerators that a model is on."""
    of_cuda = torch.cuda.default_generators
    return [torch.default_generator, *(of_cuda[index] for index in accelerators_of(model))]


def restoring_all(model: nn.Module) -> list[Callable[[], object]]:
    """Return what gives Python, numpy and torch the random states that they have now."""
    return [restoring(source) for source in (random, np.random, *generators_of(model))]


def restoring(source: Any) -> Callable[[], object]:
    """Return what gives a generator, or the module of a global one, the state that it has now."""
    if isinstance(source, np.random.Generator):
        return partial(setattr, source.bit_generator, "state", source.bit_generator.state)
    if isinstance(source, random.SystemRandom):
        return lambda: None  # it has no state
    if hasattr(source, "getstate"):  # Python's
        return partial(source.setstate, source.getstate())
    return partial(source.set_state, source.get_state())


def accelerators_of(model: nn.Module) -> list[int]:
    """Return the CUDA devices that a model is on."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    return sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})
