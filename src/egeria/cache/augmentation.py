"""Stateless augmentation: view `v` of sample `s` is the same whenever, wherever and beside whatever it is made.

The user's own data set does the augmenting. It is called for one sample at a time, with every source of
random numbers started anew from a hash of (base seed, sample, view).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawValue
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from egeria.cache.random_sources import RandomSources

UNKNOWN, ITEMS, NOT_REPEATABLE = "unknown", "items", "not repeatable"
SAMPLES, COLLATED, NOT_JOINABLE = "samples", "collated", "not joinable"
KINDS = (UNKNOWN, ITEMS, SAMPLES, COLLATED, NOT_JOINABLE, NOT_REPEATABLE)
REFUSALS = {
    NOT_JOINABLE: "the data set makes whole batches (`__getitems__`) that cannot be put together from batches of one "
    "sample; let it return a list of samples, or tensors whose first axis is the sample",
    NOT_REPEATABLE: "a sample came out differently twice although every generator in reach was seeded alike; "
    "draw from `random`, `numpy.random`, torch or from generators that the data set or its transforms hold",
}


class ViewedIndex(int):
    """The index of a sample, with the number of the augmentation variant that is wanted of it.

    An integer, so that it goes wherever indices go, through the queues to the workers among others.
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
    """How the data set makes batches, found out by the processes that make views and read by all."""

    def __init__(self) -> None:
        self._shared: Any
        try:
            self._shared = RawValue("i", KINDS.index(UNKNOWN))
        except OSError:  # no room for shared memory: each process finds out for itself
            self._shared = SimpleNamespace(value=KINDS.index(UNKNOWN))

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
    """The user's data set, which it passes for, except that a `ViewedIndex` makes that view of the sample.

    Plain indices go straight through. Where views turn out to be impossible, samples come as the user
    wrote it, and `batch_kind` says so: nothing is raised that the data set itself would not raise.
    """

    __slots__ = (
        "_egeria_base_seed",
        "_egeria_batch_kind",
        "_egeria_dataset",
        "_egeria_has_made_views",
        "_egeria_is_examined",
        "_egeria_sources",
    )

    def __init__(self, dataset: Any, base_seed: int, batch_kind: BatchKind) -> None:
        self._egeria_dataset = dataset
        self._egeria_base_seed = base_seed
        self._egeria_batch_kind = batch_kind
        self._egeria_has_made_views = False
        self._egeria_is_examined = False
        self._egeria_sources = RandomSources(dataset)

    def __getitem__(self, index: Any) -> Any:
        if type(index) is not ViewedIndex:
            return self._egeria_dataset[index]
        self._egeria_has_made_views = True
        return _items(self, [index])[0]

    def __getattr__(self, name: str) -> Any:
        if name != "__getitems__":
            return getattr(self._egeria_dataset, name)
        if _has_getitems(self._egeria_dataset):
            return lambda indices: _items(self, indices)
        if self._egeria_has_made_views:  # the random states are then kept once for a batch, not for each sample
            return lambda indices: _items(self, indices)
        return getattr(self._egeria_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ViewedDataset.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._egeria_dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._egeria_dataset, name)

    def __len__(self) -> int:
        return len(self._egeria_dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._egeria_dataset)

    @property
    def of_user(self) -> Any:
        """Return the user's data set."""
        return self._egeria_dataset

    def __repr__(self) -> str:
        return repr(self._egeria_dataset)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._egeria_dataset)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Go along to a worker that is being started; to anywhere else goes the user's data set alone."""
        if get_spawning_popen() is None:
            return _itself, (self._egeria_dataset,)
        return ViewedDataset, (self._egeria_dataset, self._egeria_base_seed, self._egeria_batch_kind)


def examine(dataset: ViewedDataset, sample: int) -> None:
    """Find out once in each process, how views of this data set can be made, with two to six calls for one sample.

    Every random state is restored. An error of the data set leaves the matter open: the call that is to
    deliver the sample will raise it too, where it belongs. Not to be called in the main process when
    workers do the loading: what the data set opens on its first call (files, databases) must not be
    inherited by workers that are forked later.
    """
    user, batch_kind, sources = dataset._egeria_dataset, dataset._egeria_batch_kind, dataset._egeria_sources
    if dataset._egeria_is_examined or batch_kind.kind in REFUSALS:
        return
    try:
        if not _repeats(dataset, sample) and not _repeats(dataset, sample):
            # Twice: what makes its generator on its first call has one in reach on the next.
            batch_kind.kind = NOT_REPEATABLE
        elif not _has_getitems(user):
            batch_kind.kind = ITEMS
        elif batch_kind.kind == UNKNOWN:
            with sources.kept():
                batch_kind.kind = kind_of_batches(_one(dataset, sample, 0), user.__getitems__([sample, sample]))
        dataset._egeria_is_examined = True
    except Exception:
        if _has_getitems(user):  # a batch of one may be what it cannot make
            batch_kind.kind = NOT_JOINABLE


def _items(dataset: ViewedDataset, indices: Any) -> Any:
    """Return what the fetcher of a loader asks for: a list of samples or whatever the user's `__getitems__` returns."""
    if not len(indices) or type(indices[0]) is not ViewedIndex:
        return _plain(dataset._egeria_dataset, indices)
    examine(dataset, int(indices[0]))
    kind = dataset._egeria_batch_kind.kind
    if kind in REFUSALS or (kind == UNKNOWN and _has_getitems(dataset._egeria_dataset)):
        return _plain(dataset._egeria_dataset, [int(index) for index in indices])
    with dataset._egeria_sources.kept():
        if not _has_getitems(dataset._egeria_dataset):
            return [_one(dataset, int(index), index.view) for index in indices]
        try:
            return join_batches([_one(dataset, int(index), index.view) for index in indices], kind)
        except Exception:
            pass  # whose fault it is, the plain call will show
    batch = _plain(dataset._egeria_dataset, [int(index) for index in indices])
    dataset._egeria_batch_kind.kind = NOT_JOINABLE
    return batch


def _repeats(dataset: ViewedDataset, sample: int) -> bool:
    with dataset._egeria_sources.kept():
        return same_sample(_one(dataset, sample, 0), _one(dataset, sample, 0))


def _plain(user: Any, indices: Any) -> Any:
    return user.__getitems__(indices) if _has_getitems(user) else [user[index] for index in indices]


def _one(dataset: ViewedDataset, sample: int, view: int) -> Any:
    dataset._egeria_sources.seed(dataset._egeria_base_seed, sample, view)
    user = dataset._egeria_dataset
    return user.__getitems__([sample]) if _has_getitems(user) else user[sample]


def _has_getitems(user: Any) -> bool:
    return bool(getattr(user, "__getitems__", None))


def _itself(dataset: Any) -> Any:
    return dataset


def kind_of_batches(of_one: Any, of_two: Any) -> str:
    """Return from a batch of one sample and one of that sample twice how batches are made up."""
    if isinstance(of_one, list) and len(of_one) == 1 and isinstance(of_two, list) and len(of_two) == 2:
        return SAMPLES
    try:
        alike = _outline(join_batches([of_one, of_one], COLLATED)) == _outline(of_two)
    except Exception:
        return NOT_JOINABLE
    return COLLATED if alike else NOT_JOINABLE


def join_batches(batches: list[Any], kind: str) -> Any:
    """Return one batch from batches of one sample each.

    Raises:
        ValueError: they hold something that has no axis of one sample.
        RuntimeError: tensors of different sizes.
    """
    if kind == SAMPLES:
        if any(len(batch) != 1 for batch in batches):
            raise ValueError("a batch of one holds several")
        return [batch[0] for batch in batches]
    return _concatenated(batches)


def same_sample(first: Any, second: Any) -> bool:
    """Return whether two samples hold equal arrays, bit for bit; anything else counts as equal."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return _same_tensors(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_sample(first[key], second[key]) for key in first)
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(map(same_sample, first, second))
    if isinstance(first, np.ndarray) and first.dtype.hasobject:
        return True
    if hasattr(first, "tobytes") and hasattr(second, "tobytes"):  # arrays, and images of Pillow
        return bool(first.tobytes() == second.tobytes())
    return True


def _same_tensors(first: Tensor, second: Tensor) -> bool:
    if first.layout is not torch.strided or first.is_quantized:
        return True
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    as_bytes = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(as_bytes[0], as_bytes[1])


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


def _outline(tree: Any) -> Any:
    """Return the shape of a batch: types of the containers, shapes and types of the arrays."""
    if isinstance(tree, (Tensor, np.ndarray)):
        return type(tree), tuple(tree.shape), tree.dtype
    if isinstance(tree, Mapping):
        return type(tree), {key: _outline(value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree), [_outline(value) for value in tree]
    return type(tree)
