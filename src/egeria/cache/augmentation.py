"""Stateless augmentation: view `v` of sample `s` is the same whenever, wherever and beside whatever
it is made.

The user's own data set does the augmenting. It is called for one sample at a time, with every
source of random numbers started anew from a hash of (base seed, sample, view), and put back
afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawValue
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from egeria.random_state import held_generators, restoring

KINDS = ("unknown", "samples", "collated", "not joinable", "not repeatable")
UNKNOWN, SAMPLES, COLLATED, NOT_JOINABLE, NOT_REPEATABLE = KINDS
REFUSALS = {
    NOT_JOINABLE: "the data set makes whole batches (`__getitems__`) that cannot be put together "
    "from batches of one "
    "sample; let it return a list of samples, or tensors whose first axis is the sample",
    NOT_REPEATABLE: "a sample came out differently twice although every generator in reach was "
    "seeded alike; "
    "draw from `random`, `numpy.random`, torch or from generators that the data set or its "
    "transforms hold",
}


class ViewedIndex(int):
    """The index of a sample and the augmentation variant wanted of it; goes wherever integers go,
    also to workers.
    """

    view: int

    def __new__(cls, sample: int, view: int) -> ViewedIndex:
        """Make the index of one view."""
        index = super().__new__(cls, sample)
        index.view = view
        return index

    def __reduce__(self) -> tuple[type[ViewedIndex], tuple[int, int]]:
        return ViewedIndex, (int(self), self.view)


class BatchKind:
    """How the data set makes batches, one of KINDS: found out by the processes that make views and
    read by all.
    """

    def __init__(self) -> None:
        self._shared: Any = SimpleNamespace(value=0)
        with suppress(OSError):  # no room for shared memory: each process finds out for itself
            self._shared = RawValue("i", 0)

    @property
    def kind(self) -> str:
        """Return one of KINDS."""
        return KINDS[self._shared.value]

    @kind.setter
    def kind(self, kind: str) -> None:
        self._shared.value = KINDS.index(kind)

    @property
    def refusal(self) -> str | None:
        """Return why there can be no views, or None."""
        return REFUSALS.get(self.kind)


class ViewedDataset:
    """The user's data set, which it passes for, except that a `ViewedIndex` makes that view of the
    sample.

    Where views turn out to be impossible, samples come as the user wrote it, and the `BatchKind`
    says so: nothing is raised that the data set itself would not raise.
    """

    __slots__ = ("egeria_views",)

    def __init__(self, dataset: Any, base_seed: int, batch_kind: BatchKind) -> None:
        object.__setattr__(self, "egeria_views", ViewMaker(dataset, base_seed, batch_kind))

    def __getitem__(self, index: Any) -> Any:
        if type(index) is not ViewedIndex:
            return self.egeria_views.dataset[index]
        self.egeria_views.has_made_views = True
        return self.egeria_views.items([index])[0]

    def __getattr__(self, name: str) -> Any:
        views = self.egeria_views
        # Once views are made, the random states are kept once for a batch, not for each sample.
        if name == "__getitems__" and (views.makes_batches or views.has_made_views):
            return views.items
        return getattr(views.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.egeria_views.dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.egeria_views.dataset, name)

    def __len__(self) -> int:
        return len(self.egeria_views.dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.egeria_views.dataset)

    def __repr__(self) -> str:
        return repr(self.egeria_views.dataset)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.egeria_views.dataset)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Go along to a worker that is being started; to anywhere else goes the user's data set
        alone.
        """
        views = self.egeria_views
        if get_spawning_popen() is None:
            return _itself, (views.dataset,)
        return ViewedDataset, (views.dataset, views.base_seed, views.batch_kind)


def _itself(dataset: Any) -> Any:
    return dataset


@dataclass(eq=False)
class ViewMaker:
    """Makes views of the samples of a data set, in one process."""

    dataset: Any
    base_seed: int
    batch_kind: BatchKind
    has_made_views: bool = False
    _is_examined: bool = False
    _sources: dict[str, Any] = field(default_factory=dict)

    @property
    def makes_batches(self) -> bool:
        """Return whether the data set makes whole batches."""
        return bool(getattr(self.dataset, "__getitems__", None))

    def examine(self, sample: int) -> None:
        """Find out once in each process, how views can be made, with two to six calls for one
        sample.

        Not for the main process when workers do the loading: they must not inherit the files that
        the data set opens.
        """
        if self._is_examined or self.batch_kind.kind in REFUSALS:
            return
        try:
            if not self._repeats(sample) and not self._repeats(sample):
                # Twice: what makes its generator on its first call has one in reach on the next.
                self.batch_kind.kind = NOT_REPEATABLE
            elif self.makes_batches and self.batch_kind.kind == UNKNOWN:
                with self._sources_kept():
                    of_one = self._one(sample, 0)
                    self.batch_kind.kind = _kind_of_batches(
                        of_one, self.dataset.__getitems__([sample, sample])
                    )
            self._is_examined = True
        except Exception:  # the call that is to deliver the sample will raise it too
            if self.makes_batches:  # a batch of one may be what it cannot make
                self.batch_kind.kind = NOT_JOINABLE

    def items(self, indices: Any) -> Any:
        """Return what the fetcher of a loader asks for: a list of samples or what the user's
        `__getitems__` returns.
        """
        if not len(indices) or type(indices[0]) is not ViewedIndex:
            return self._plain(indices)
        self.examine(int(indices[0]))
        kind = self.batch_kind.kind
        if kind in REFUSALS or (kind == UNKNOWN and self.makes_batches):
            return self._plain([int(index) for index in indices])
        with self._sources_kept():
            if not self.makes_batches:
                return [self._one(int(index), index.view) for index in indices]
            try:
                return _joined([self._one(int(index), index.view) for index in indices], kind)
            except Exception:
                pass  # whose fault it is, the plain call will show
        batch = self._plain([int(index) for index in indices])
        self.batch_kind.kind = NOT_JOINABLE
        return batch

    def _repeats(self, sample: int) -> bool:
        with self._sources_kept():
            first, second = (_picture(self._one(sample, 0), _bits) for _ in range(2))
        return bool(first == second)

    def _plain(self, indices: Any) -> Any:
        return (
            self.dataset.__getitems__(indices)
            if self.makes_batches
            else [self.dataset[index] for index in indices]
        )

    def _one(self, sample: int, view: int) -> Any:
        for name, source in self._sources.items():
            _seed(source, seed_of(self.base_seed, sample, view, name))
        return self.dataset.__getitems__([sample]) if self.makes_batches else self.dataset[sample]

    @contextmanager
    def _sources_kept(self) -> Iterator[None]:
        """Restore the state of every source of random numbers after the block, whatever happens in
        it.
        """
        held = held_generators(
            self.dataset
        )  # anew each time: some are made when first used, in the worker
        # Not the module `torch`: its `manual_seed` takes 70 times as long and touches every device.
        self._sources = {
            "python": random,
            "numpy": np.random,
            "torch": torch.default_generator,
            **held,
        }
        states = [restoring(source) for source in self._sources.values()]
        try:
            yield
        finally:
            for restore in states:
                restore()


def _kind_of_batches(of_one: Any, of_two: Any) -> str:
    """Return from a batch of one sample and one of that sample twice how batches are made up."""
    if (
        isinstance(of_one, list)
        and len(of_one) == 1
        and isinstance(of_two, list)
        and len(of_two) == 2
    ):
        return SAMPLES
    try:
        alike = _picture(_concatenated([of_one, of_one]), _outline) == _picture(of_two, _outline)
    except Exception:
        return NOT_JOINABLE
    return COLLATED if alike else NOT_JOINABLE


def _joined(batches: list[Any], kind: str) -> Any:
    """Return one batch from batches of one sample each; ValueError or RuntimeError where that
    cannot be.
    """
    if kind != SAMPLES:
        return _concatenated(batches)
    if any(len(batch) != 1 for batch in batches):
        raise ValueError("a batch of one holds several")
    return [batch[0] for batch in batches]


def _concatenated(trees: list[Any]) -> Any:
    first = trees[0]
    if isinstance(first, (Tensor, np.ndarray)):
        if any(tensor.ndim == 0 or tensor.shape[0] != 1 for tensor in trees):
            raise ValueError("no axis of one sample")
        return torch.cat(cast(Any, trees)) if isinstance(first, Tensor) else np.concatenate(trees)
    if isinstance(first, Mapping):
        items = {key: _concatenated([tree[key] for tree in trees]) for key in first}
        return items if type(first) is dict else type(first)(items)  # type: ignore[call-arg]
    if isinstance(first, (tuple, list)):
        members = [_concatenated(list(group)) for group in zip(*trees, strict=True)]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    raise ValueError(f"{type(first).__name__} has no axis of one sample")


def _picture(tree: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """Return a tree as something to compare: the types of its containers, and what `of_leaf` tells
    of the rest.
    """
    if isinstance(tree, Mapping):
        return type(tree), {key: _picture(value, of_leaf) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree), [_picture(value, of_leaf) for value in tree]
    return of_leaf(tree)


def _outline(leaf: Any) -> Any:
    return (
        (type(leaf), tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, (Tensor, np.ndarray))
        else type(leaf)
    )


def _bits(leaf: Any) -> Any:
    """Return what an array or an image of Pillow holds, bit for bit; None for
    what counts as equal.
    """
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided or leaf.is_quantized:
            return None
        return (
            leaf.shape,
            leaf.dtype,
            leaf.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes(),
        )
    if isinstance(leaf, np.ndarray) and leaf.dtype.hasobject:
        return None
    return leaf.tobytes() if hasattr(leaf, "tobytes") else None


def seed_of(base_seed: int, sample: int, view: int, name: str) -> int:
    """Return the seed of one source for one view of one sample, 64 bits; sources get unrelated
    ones.
    """
    text = f"{base_seed}/{sample}/{view}/{name}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def _seed(source: Any, seed: int) -> None:
    if isinstance(source, torch.Generator):
        source.manual_seed(seed)
    elif isinstance(source, np.random.Generator):
        source.bit_generator.state = type(source.bit_generator)(seed).state
    else:
        source.seed(
            seed >> 32 if source is np.random or isinstance(source, np.random.RandomState) else seed
        )
