"""`LookAhead`: takes one batch ahead from a loader, so that its rows are read in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from egeria import tree
from egeria.cache.sampler import ShardSampler
from egeria.model.batch import Batch

METHOD = "_get_iterator"
WHAT = "reading rows ahead"
DRAWS_AT_ONCE = (SequentialSampler, RandomSampler, DistributedSampler, ShardSampler)
"""Samplers that draw an epoch's random numbers when it begins: from others a batch that is taken
early would draw early, and an epoch that is left early (`break`) would have drawn more."""


class LookAhead:
    """Follows a loader with workers, whose batches are made ahead anyway; the order stays."""

    def __init__(
        self,
        loader: DataLoader[Any],
        expect: Callable[[Batch], None],
        decline: Callable[[str, str], None],
    ) -> None:
        self._loader, self._expect, self.decline = loader, expect, decline
        self._places: list[str | None] | None = None
        """For each tensor of a call, where the batches of the loader have it."""
        self._call: Batch | None = None
        self.newest: Any = None
        """The batch that the loop was given last."""

    @classmethod
    def over(cls, loader: Any, expect: Any, decline: Any) -> LookAhead | None:
        """Return one that follows a loader from its next iterator on; None for other loaders."""
        if type(loader) is not DataLoader or not loader.num_workers or loader.persistent_workers:
            return None
        sampler: Any = getattr(loader.batch_sampler, "sampler", None)
        draws_later = getattr(sampler, "replacement", False) or (
            isinstance(sampler, RandomSampler) and sampler.generator is not None
        )
        is_plain = type(loader.batch_sampler) is BatchSampler and type(sampler) in DRAWS_AT_ONCE
        if draws_later or not is_plain:
            return None
        found = cls(loader, expect, decline)
        make = loader._get_iterator
        vars(loader)[METHOD] = lambda: _Ahead(make(), found)
        return found

    def close(self) -> None:
        """Leave the loader as it was; an iterator under way goes on."""
        vars(self._loader).pop(METHOD, None)
        self._places, self.newest, self._call = [], None, None

    def learn(self, batch: Batch) -> None:
        """Find out, once, which tensors of the loader the model was called with."""
        if self._places is not None or self.newest is None:
            return
        named, self._call = dict(tree.named_leaves(self.newest)), batch
        self._places = [
            next((name for name, own in named.items() if _is_same(own, given)), None)
            for given in tree.leaves(batch.arguments)
        ]
        if None in self._places:
            self._places = []
            self.decline(WHAT, "the model is not called with what the loader gives, as it is")

    def tell(self, coming: Any) -> None:
        """Prepare for the batch behind the one that the loop is given now."""
        if not self._places or self._call is None:
            return
        try:
            named, places = dict(tree.named_leaves(coming)), iter(self._places)
            args, kwargs = tree.map_tensors(
                lambda _: named[next(places) or ""], self._call.arguments
            )
            self._expect(replace(self._call, args=args, kwargs=kwargs))
        except Exception as error:
            self._places = []
            self.decline(WHAT, f"a batch is of another kind ({error})")


class _Ahead:
    """An iterator over batches that takes each next one, or the error in its place, ahead."""

    def __init__(self, batches: Iterator[Any], owner: LookAhead) -> None:
        self._batches, self._owner = batches, owner
        self._coming: tuple[Any, Exception | None] | None = None

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        batch, error = self._coming or self._take()
        self._coming = None
        if error is not None:
            raise error
        self._owner.newest, self._coming = batch, self._take()
        if self._coming[1] is None:
            self._owner.tell(self._coming[0])
        return batch

    def _take(self) -> tuple[Any, Exception | None]:
        try:
            return next(self._batches), None
        except Exception as error:  # it belongs to the next call
            return None, error


def _is_same(first: Tensor, second: Tensor) -> bool:
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and torch.equal(first, second.cpu())
    )
