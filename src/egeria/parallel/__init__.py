"""How many processes train together: what a frozen prefix means for them."""

from egeria.parallel.choice import choose_parallel
from egeria.parallel.protocol import ParallelStrategy
from egeria.parallel.refusals import COMPILED_SHARDS
from egeria.parallel.replicas import Replicas
from egeria.parallel.sharded import Sharded
from egeria.parallel.single import SingleProcess

__all__ = ["COMPILED_SHARDS", "ParallelStrategy", "Replicas", "Sharded", "SingleProcess", "choose_parallel"]
