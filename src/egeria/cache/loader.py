"""What the cache needs of a loader: a process's own samples, and the next batch one ahead."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import data

from egeria import tree
from egeria.distributed import ranks
from egeria.model.passes import Batch


class ShardSampler(data.DistributedSampler[int]):
    """Deals the samples out to the processes once, and shuffles each one's part in every epoch.

    `DistributedSampler`, which it stands in for, deals anew in every epoch, so that a sample comes
    to another process than the one that has stored its activations. In return the batches of a
    process are drawn from its own part alone.

    Attributes:
        own: the samples of this process.

    Args:
        dataset: what is dealt out.
        num_replicas: processes; None for those of the job.
        rank: of this process; None for the job's.
        options: `shuffle`, `seed` and `drop_last`, as for `DistributedSampler`.

    Raises:
        ValueError: there is no such rank, or a process would get no sample.
    """

    def __init__(
        self, dataset: Any, num_replicas: int | None = None, rank: int | None = None, **options: Any
    ) -> None:
        num_replicas = ranks.world_size() if num_replicas is None else num_replicas
        rank = ranks.rank() if rank is None else rank
        super().__init__(dataset, num_replicas, rank, **options)
        size = len(dataset)
        if self.num_samples <= 0:
            what = f"{size} samples cannot be dealt out to {num_replicas} processes"
            raise ValueError(f"{what} without drop_last=False")
        generator = torch.Generator().manual_seed(self.seed)
        dealt = torch.randperm(size, generator=generator) if self.shuffle else torch.arange(size)
        all_dealt = dealt.repeat(-(-self.total_size // size))[: self.total_size]
        self.own: Tensor = all_dealt[rank::num_replicas]

    def __iter__(self) -> Iterator[int]:
        """Yield the samples of this process, in the order of the epoch."""
        if not self.shuffle:
            return iter(self.own.tolist())
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch, self.rank)) % 2**63)
        return iter(self.own[torch.randperm(len(self.own), generator=generator)].tolist())


def can_look_ahead(loader: Any) -> bool:
    """Return whether a batch can be taken from a loader early without a change to any other.

    It has workers, which make batches ahead anyway, and a sampler that draws all random numbers of
    an epoch when it begins: others would draw early, and more in an epoch that is left early.
    """
    if type(loader) is not data.DataLoader or not loader.num_workers or loader.persistent_workers:
        return False
    if type(loader.batch_sampler) is not data.BatchSampler:
        return False
    sampler: Any = loader.batch_sampler.sampler
    if type(sampler) is data.RandomSampler:
        return not sampler.replacement and sampler.generator is None
    return type(sampler) in (data.SequentialSampler, data.DistributedSampler, ShardSampler)


class LookAhead:
    """Tells what the model will be called with next, from the next iterator of a loader on."""

    def __init__(
        self,
        loader: data.DataLoader[Any],
        expect: Callable[[Batch], None],
        decline: Callable[[str, str], None],
    ) -> None:
        self._loader, self._expect, self._decline = loader, expect, decline
        self._call: Batch | None = None  # an example
        # For each of its tensors, where the batches of the loader have it; None before an example.
        self._places: list[str | None] | None = None
        self.newest: Any = None  # the batch that the loop was given last
        make = loader._get_iterator
        vars(loader)["_get_iterator"] = lambda: _Ahead(make(), self)

    def close(self) -> None:
        """Leave the loader as it was; an iterator under way goes on."""
        vars(self._loader).pop("_get_iterator", None)
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
            self._end("the model is not called with what the loader gives, as it is")

    def tell(self, coming: Any) -> None:
        """Prepare for the batch after the one that the loop gets now."""
        if not self._places or self._call is None:
            return
        try:
            named, places = dict(tree.named_leaves(coming)), iter(self._places)
            given = tree.map_tensors(lambda _: named[next(places) or ""], self._call.arguments)
            self._expect(replace(self._call, args=given[0], kwargs=given[1]))
        except Exception as error:
            self._end(f"a batch is of another kind ({error})")

    def _end(self, reason: str) -> None:
        self._places = []
        self._decline("reading rows ahead", reason)


class _Ahead:
    """An iterator over batches that takes each next one, or the error in its place, ahead."""

    def __init__(self, batches: Iterator[Any], owner: LookAhead) -> None:
        self._batches, self._owner = batches, owner
        self._coming: tuple[Any, Exception | None] | None = None

    def __iter__(self) -> "_Ahead":
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
    is_alike = first.shape == second.shape and first.dtype == second.dtype
    return is_alike and torch.equal(first, second.cpu())
