"""`PendingBatches`: which of the batches that a loader has handed out a forward pass is of.

Loaders and loops run ahead of the model: by one batch (Accelerate, Lightning), by the batches of
one optimizer step (the `Trainer` of transformers), by as many as a prefetching thread likes. A
batch is recognised by the memory of its tensors or, where it was copied, by some of its elements.
Where the model is called with something made from the batch, what is left is the order. None of
this keeps a batch alive, and nothing rests on it but the number of rows that are served: a stored
row is used for equal input only.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from egeria import tree

if TYPE_CHECKING:
    from egeria.cache.samples import BatchIndices

MOST_PENDING = 512
"""Batches that a loader is followed ahead of the model."""
MOST_TAKEN = 8
"""Batches that are recognised once more after their forward pass."""
MOST_FOREIGN = 8
"""Forward passes in a row of nothing that was handed out, before that may be something made from
the batches."""
NUM_ELEMENTS = 512
"""Elements of a tensor that are compared where batches are copied."""
DEEPEST, MOST_TENSORS, MOST_PLAIN = 4, 64, 64
"""How far tensors are looked for: containers inside of others, all of them, entries of lists of
numbers or strings."""

Storages = dict[tuple[int, int], StorageWeakRef]
"""The memory of tensors, by its identity and where in it each begins; held weakly."""


@dataclass(eq=False, slots=True)
class PendingBatch:
    """A batch that the loader has handed out."""

    indices: BatchIndices | None
    """Its samples; None where they are not known."""
    pass_number: int
    storages: Storages
    """That of its tensors, but for those that other batches have too."""
    contents: frozenset[int] | None
    """Hashes of some elements of each tensor; None where nobody asked for them in time."""


class PendingBatches:
    """The batches handed out that no forward pass has been made of; safe to be filled by another
    thread.
    """

    def __init__(self) -> None:
        self._pending: deque[PendingBatch] = deque(maxlen=MOST_PENDING)
        self._taken: deque[PendingBatch] = deque(maxlen=MOST_TAKEN)
        self._lock = threading.Lock()
        self._newest: PendingBatch | None = None
        self._before: Storages = {}
        self._pass_number = 0
        self._has_ended = True
        self._reads_contents = False
        self._num_foreign = MOST_FOREIGN
        self._num_guessed = 0
        self._takes_all: bool | None = None
        """Whether the loop uses every batch, where only the order tells them apart; None until a
        pass has shown it."""

    def begin(self) -> None:
        """Note that the loader begins a pass."""
        self._pass_number += 1

    def end(self) -> None:
        """Note that the loader hands out no more in this pass, or failed to."""
        self._has_ended = True

    def add(self, indices: BatchIndices | None, batch: Any) -> None:
        """Note a batch that is handed out, with its samples."""
        tensors = _tensors_of(batch)
        storages = _storages(tensors)
        shared = (
            storages.keys() & self._before.keys()
        )  # such as a mask that is the same in each batch
        contents = _contents(tensors) if self._reads_contents else None
        own = {key: storage for key, storage in storages.items() if key not in shared}
        entry = PendingBatch(indices, self._pass_number, own, contents)
        with self._lock:
            if self._newest is not None:
                self._judge_order(self._newest, entry)
                for key in shared:
                    self._newest.storages.pop(key, None)
            self._pending.append(entry)
            self._newest, self._before, self._has_ended = entry, storages, False

    def take(self, call: Any) -> BatchIndices | None:
        """Return the samples of the batch that the model is called with; None where it cannot be
        told.

        The batches handed out before it are not expected any more.

        Args:
            call: the arguments of the call.
        """
        tensors = _tensors_of(call)
        with self._lock:
            entry = self._recognised(tensors)
            if entry is not None:
                self._num_foreign = 0
                self._pass_up_to(entry)
                return entry.indices
            if self._num_foreign < MOST_FOREIGN:
                self._num_foreign += 1
                if (
                    self._num_foreign == MOST_FOREIGN
                ):  # they were made from the batches in order, it seems
                    self._pass_over(MOST_FOREIGN)
                return None
            entry = self._next_in_order()
            return None if entry is None else entry.indices

    def waiting(self) -> list[BatchIndices]:
        """Return the samples of the batches that are handed out and expected, in order."""
        with self._lock:
            return [entry.indices for entry in self._pending if entry.indices is not None]

    def _recognised(self, tensors: list[Tensor]) -> PendingBatch | None:
        keys = _storages(tensors).keys()
        candidates = itertools.chain(self._pending, reversed(self._taken))
        entry = next((entry for entry in candidates if not keys.isdisjoint(entry.storages)), None)
        if entry is not None:
            self._reads_contents = False
        elif self._reads_contents:
            entry = self._alike(_contents(tensors))
        return entry

    def _alike(self, contents: frozenset[int]) -> PendingBatch | None:
        """Return the only batch that has most tensors in common with a call."""
        candidates = [*self._pending, *self._taken]
        numbers = [len(contents & (entry.contents or frozenset())) for entry in candidates]
        most = max(numbers, default=0)
        return candidates[numbers.index(most)] if most and numbers.count(most) == 1 else None

    def _next_in_order(self) -> PendingBatch | None:
        """Return the batch whose turn it is, where none is recognised; None as long as that cannot
        be relied on.
        """
        if not self._pending:  # a second forward pass of the same batch
            return self._taken[-1] if self._taken and not self._has_ended else None
        latest = [
            entry for entry in self._pending if entry.pass_number == self._pending[-1].pass_number
        ]
        is_ahead, self._reads_contents = len(latest) > 1, self._reads_contents or len(latest) > 1
        chosen = latest[-1] if self._takes_all is False else latest[0]
        self._num_guessed += is_ahead
        self._pass_up_to(chosen)
        if is_ahead and (chosen.contents is None or self._takes_all is None):
            return None
        return chosen

    def _judge_order(self, before: PendingBatch, entry: PendingBatch) -> None:
        """See, at the first batch of a pass, whether the loop has used every batch of the one
        before.
        """
        if before.pass_number == entry.pass_number:
            return
        if self._num_guessed and self._has_ended and self._takes_all is None:
            self._takes_all = not self._pending
        self._num_guessed = 0

    def _pass_up_to(self, entry: PendingBatch) -> None:
        if entry in self._pending:
            self._pass_over(self._pending.index(entry) + 1)

    def _pass_over(self, count: int) -> None:
        self._taken.extend([self._pending.popleft() for _ in range(min(count, len(self._pending)))])


def _tensors_of(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    with suppress(Exception):  # a container of the user's may raise anything
        found.extend(itertools.islice(_tensors(value, 0), MOST_TENSORS))
    return found


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in a batch: in containers, and in objects of the user's that hold them."""
    if isinstance(value, Tensor):
        yield value
    elif depth <= DEEPEST:
        for entry in _entries(value):
            yield from _tensors(entry, depth + 1)


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (tuple, list)):
        return () if len(value) > MOST_PLAIN and tree.is_plain(value[0]) else value
    if tree.is_plain(value) or isinstance(value, (type, nn.Module)) or callable(value):
        return ()
    return list(getattr(value, "__dict__", {}).values())


def _storages(tensors: Iterable[Tensor]) -> Storages:
    storages: Storages = {}
    for tensor in tensors:
        with suppress(Exception):  # sparse tensors, and others of no memory of their own
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            storages[storage.cdata, int(tensor.storage_offset())] = storage
    return storages


@torch.no_grad()
def _contents(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Return a hash for each tensor of elements from all over it; of equal ones where it was copied
    or reshaped.
    """
    hashes = set()
    for tensor in tensors:
        with suppress(Exception):  # a kind of tensor whose elements cannot be read
            step = max(1, tensor.numel() // NUM_ELEMENTS)
            places = torch.arange(0, tensor.numel(), step, device=tensor.device)
            elements = (
                tensor[torch.unravel_index(places, tensor.shape)]
                if tensor.dim()
                else tensor.reshape(1)
            )
            found = elements.cpu().view(torch.uint8).numpy().tobytes()
            hashes.add(hash((tensor.numel(), tensor.dtype, found)))
    return frozenset(hashes)
