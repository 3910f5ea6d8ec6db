"""The batches of a loader, without using it up; the state of a training, kept as it was."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from egeria.cache import length_of
from egeria.errors import ConfigError

NUM_DRAWN_TWICE = 16
"""Samples that are drawn twice: what is random at every second time, as a flip is, goes unseen once
in 65,000 times."""


class Source:
    """Takes batches of a loader without using it up, and without its workers."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._dataset: Any = loader.dataset if isinstance(loader, DataLoader) else None
        self._is_stream = isinstance(self._dataset, IterableDataset)
        self.num_samples: int | None = None
        self.reading_s = 0.0
        """Seconds that a batch took to be read, in this process."""
        self.has_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
        if self._dataset is not None and not self._is_stream:
            self.num_samples = length_of(self._dataset)

    def take(self, count: int) -> list[Any]:
        """Return copies of the first batches."""
        began = time.perf_counter()
        try:
            given = list(itertools.islice(self._batches(), count))
            self.reading_s = (time.perf_counter() - began) / max(1, len(given))
            found = copy.deepcopy(given)
        except Exception as error:
            raise ConfigError(
                "loader is a DataLoader whose samples can be read in this process, or a list of "
                "batches; found "
                f"{type(error).__name__}: {error}. Pass a list of a few batches."
            ) from error
        if not found:
            raise ConfigError(
                "loader must have a batch at least, found none. Pass a list of a few batches."
            )
        return found

    def repeats(self) -> bool | None:
        """Return whether a sample is the same each time it is drawn; None where that cannot be
        told.
        """
        if self._loader_draws_batches or self.num_samples is None:
            return None
        try:
            drawn = itertools.chain.from_iterable(self._sampler())
            return all(
                _same(self._fetch([place]), self._fetch([place]))
                for place in itertools.islice(drawn, NUM_DRAWN_TWICE)
            )
        except Exception:  # samples may be anything, and need not be comparable
            return None

    def _batches(self) -> Iterable[Any]:
        loader = self._loader
        if not isinstance(loader, DataLoader):
            if not isinstance(loader, Sequence):
                raise TypeError(f"{type(loader).__name__}, which reading might use up")
            return loader
        if type(loader).__iter__ is not DataLoader.__iter__:
            raise TypeError(
                f"{type(loader).__name__}, whose own way of giving batches reading might use up"
            )
        if self._is_stream:
            dataset = copy.deepcopy(self._dataset)
            return DataLoader(dataset, batch_size=loader.batch_size, collate_fn=loader.collate_fn)
        return (loader.collate_fn(self._fetch(drawn)) for drawn in self._sampler())

    def _sampler(self) -> Iterable[Any]:
        """Return a copy of what the loader draws by: lists of places, or what its data set makes
        batches of.
        """
        loader, kept = (
            self._loader,
            {id(self._dataset): self._dataset},
        )  # the sampler refers to the data set itself
        given = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        return cast(Iterable[Any], copy.deepcopy(given, kept))

    @property
    def _loader_draws_batches(self) -> bool:
        """Whether the data set puts batches together, so that there is no single sample."""
        return isinstance(self._loader, DataLoader) and self._loader.batch_sampler is None

    def _fetch(self, drawn: Any) -> Any:
        if self._loader_draws_batches:
            return self._dataset[drawn]
        fetch = getattr(self._dataset, "__getitems__", None)
        return fetch(drawn) if callable(fetch) else [self._dataset[place] for place in drawn]


class Witness:
    """Tells whether the user's own model was touched while a copy of it trained, and puts it right.

    Args:
        model: of the user.
        optimizers: of the user; they may hold parameters beside the model's, as a criterion has
            them.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        held = (
            entry
            for optimizer in optimizers
            for group in optimizer.param_groups
            for entry in group["params"]
        )
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.clone())
            for parameter in dict.fromkeys([*model.parameters(), *held])
        ]
        self._buffers = [
            (buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers()
        ]

    @property
    def is_touched(self) -> bool:
        """Whether a gradient or a buffer is another one."""
        others = any(parameter.grad is not gradient for parameter, gradient, _ in self._gradients)
        return others or any(buffer._version != version for buffer, version, _ in self._buffers)

    @torch.no_grad()
    def put_right(self) -> None:
        """Give the model back as it was."""
        for parameter, gradient, values in self._gradients:
            parameter.grad = gradient
            if gradient is not None and values is not None:
                gradient.copy_(values)
        for buffer, _, values in self._buffers:
            buffer.copy_(values)


def _same(one: Any, other: Any) -> bool:
    """Return whether two samples are equal: all tensors and arrays, and whatever else is compared
    by value.

    Raises:
        TypeError: they have no values to compare.
    """
    if isinstance(one, (Tensor, np.ndarray)):
        first, second = torch.as_tensor(one), torch.as_tensor(other)
        return first.shape == second.shape and torch.allclose(
            first, second, rtol=0, atol=0, equal_nan=True
        )
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    if "__eq__" not in vars(type(one)) and one is not other:
        raise TypeError(f"{type(one).__name__} has no values to compare")
    return bool(one == other)
