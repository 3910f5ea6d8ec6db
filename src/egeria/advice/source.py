"""The batches of a loader, without using it up: random states and order are afterwards what they were."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from egeria.errors import ConfigError

LONGEST, DEEPEST = 100, 6
"""Containers and nested objects in which generators are looked for; a longer list holds samples."""


class Source:
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
            found = copy.deepcopy(list(itertools.islice(self._batches(), count)))  # a model may overwrite its input
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

    @contextmanager
    def kept_generators(self) -> Iterator[None]:
        """Restore the random generators that the loader and its data set hold, as augmentation has them."""
        restoring = [*_states(self._loader, DEEPEST, set())]
        try:
            yield
        finally:
            for restore in restoring:
                restore()


def _states(holder: Any, deepest: int, seen: set[int]) -> Iterator[Callable[[], object]]:
    """Yield what sets each generator that an object leads to back to where it is now."""
    if id(holder) in seen or not deepest:
        return
    seen.add(id(holder))
    if isinstance(holder, (torch.Generator, np.random.RandomState)):
        given: Any = holder
        yield partial(given.set_state, given.get_state())
    elif isinstance(holder, random.Random):
        yield partial(holder.setstate, holder.getstate())
    elif isinstance(holder, np.random.Generator):
        yield partial(setattr, holder.bit_generator, "state", copy.deepcopy(holder.bit_generator.state))
    else:
        for part in _parts(holder):
            yield from _states(part, deepest - 1, seen)


def _parts(holder: Any) -> list[Any]:
    """Return what an object holds, as far as that may be, or lead to, a generator."""
    if isinstance(holder, (Tensor, np.ndarray, type, str, bytes)):
        return []
    found = holder.values() if isinstance(holder, Mapping) else holder
    if not isinstance(holder, (Mapping, list, tuple)):
        found = getattr(holder, "__dict__", {}).values()
    return list(found) if len(found) <= LONGEST else []


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
