"""Which strategy a model trains under, by its wrapper and by the job."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from egeria import dist
from egeria.layers.shards import is_sharded, without_wrapper
from egeria.parallel.protocol import ParallelStrategy
from egeria.parallel.refusals import refuse_shards, refuse_wrapper
from egeria.parallel.replicas import Replicas
from egeria.parallel.sharded import Sharded
from egeria.parallel.single import SingleProcess


def choose_parallel(model: nn.Module) -> ParallelStrategy:
    """Return the strategy for what was given to `attach`.

    A bare model in a job of several processes is one replica of it, and `attach` wraps it.
    """
    refused = refuse_wrapper(model)
    if refused is not None:
        return SingleProcess(refused)
    if is_sharded(model):
        refused = refuse_shards(model)
        return SingleProcess(refused) if refused else Sharded()
    if isinstance(without_wrapper(model), DistributedDataParallel) or dist.world_size() > 1:
        return Replicas()
    return SingleProcess()
