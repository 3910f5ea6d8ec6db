"""What the cache needs of a loader in a job of several processes: samples of its own for each."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import data

from egeria.distributed import ranks


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
        if self.num_samples <= 0:
            what = f"{len(dataset)} samples cannot be dealt out to {num_replicas} processes"
            raise ValueError(f"{what}. Pass more, or leave out drop_last=True.")
        self.own: Tensor = torch.tensor(list(super().__iter__()))  # its part in epoch 0

    def __iter__(self) -> Iterator[int]:
        """Yield the samples of this process, in the order of the epoch."""
        if not self.shuffle:
            return iter(self.own.tolist())
        generator = torch.Generator().manual_seed(hash((self.seed, self.epoch, self.rank)) % 2**63)
        return iter(self.own[torch.randperm(len(self.own), generator=generator)].tolist())
