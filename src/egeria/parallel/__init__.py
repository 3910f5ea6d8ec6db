"""How many processes train together: what a frozen prefix means for them."""

from egeria.parallel.refusals import COMPILED_SHARDS
from egeria.parallel.strategies import ParallelStrategy, Replicas, Sharded, SingleProcess, choose_parallel

__all__ = ["COMPILED_SHARDS", "ParallelStrategy", "Replicas", "Sharded", "SingleProcess", "choose_parallel"]
