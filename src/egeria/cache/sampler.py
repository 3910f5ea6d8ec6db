"""A sampler under which each process of a job sees the same samples in every epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from egeria import dist


class ShardSampler(Sampler[int]):
    """Deals the samples out to the processes once, and shuffles each one's part anew in every epoch.

    `DistributedSampler` deals anew in every epoch, so that a sample comes to another host than the one that has stored
    its activations. Here what was stored once is found again from the second epoch on. In return the batches of a
    process are drawn from its own part alone; over all processes an epoch is still every sample once. Call
    `set_epoch` as for `DistributedSampler`, which it stands in for.

    Args:
        dataset: what is dealt out.
        num_replicas: processes; None for those of the job.
        rank: of this process; None for the job's.
        shuffle: whether an epoch has an order of its own.
        seed: of the dealing and of the orders; the same in all processes.
        drop_last: leave out samples so that all get the same number, in place of giving some twice.

    Raises:
        ValueError: there is no such rank, or a process would get no sample.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        num_replicas = dist.world_size() if num_replicas is None else num_replicas
        rank = dist.rank() if rank is None else rank
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be one of {num_replicas} processes, found {rank}")
        size = len(dataset)
        share = size / num_replicas
        self.num_samples = math.floor(share) if drop_last else math.ceil(share)
        if self.num_samples == 0:
            raise ValueError(f"{size} samples cannot be dealt out to {num_replicas} processes without drop_last=False")
        self._shuffle = shuffle
        self._seed = seed
        self._rank = rank
        self._epoch = 0
        dealt = torch.randperm(size, generator=torch.Generator().manual_seed(seed)) if shuffle else torch.arange(size)
        dealt = dealt.repeat(-(-self.num_samples * num_replicas // max(1, size)))[: self.num_samples * num_replicas]
        self._own = dealt[rank::num_replicas]

    def __iter__(self) -> Iterator[int]:
        """Yield the samples of this process, in the order of the epoch."""
        if not self._shuffle:
            return iter(self._own.tolist())
        generator = torch.Generator().manual_seed(hash((self._seed, self._epoch, self._rank)) % 2**63)
        return iter(self._own[torch.randperm(len(self._own), generator=generator)].tolist())

    def __len__(self) -> int:
        """Return how many samples this process sees in an epoch."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the coming epoch."""
        self._epoch = epoch
