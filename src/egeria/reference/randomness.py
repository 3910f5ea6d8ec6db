"""Telling whether a forward pass draws random numbers, which a traced one may have done once and for all."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from egeria import tree

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def random_states(model: nn.Module) -> tuple[Any, ...]:
    """Return the random states of Python, numpy and torch, on the CPU and the model's devices, to be compared."""
    of_numpy: Any = np.random.get_state()
    return (
        random.getstate(),
        tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in of_numpy),
        torch.get_rng_state().numpy().tobytes(),
        *(torch.cuda.get_rng_state(device).numpy().tobytes() for device in _gpus(model)),
    )


def draw_once(model: nn.Module) -> None:
    """Move every random state on, to where a model that throws dice may find other numbers."""
    random.random()
    np.random.random()
    for device in (torch.device("cpu"), *_gpus(model)):
        torch.rand(1, device=device)


def has_own_generator(model: nn.Module) -> bool:
    """Tell whether a submodule keeps a source of random numbers of its own."""
    return any(isinstance(value, _GENERATORS) for module in model.modules() for value in vars(module).values())


def _gpus(model: nn.Module) -> list[torch.device]:
    tensors = tree.leaves([*model.parameters(), *model.buffers()])
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
