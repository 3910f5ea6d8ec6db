"""How many processes train together: what a frozen prefix means for them."""

from egeria.parallel.choice import choose_parallel
from egeria.parallel.protocol import ParallelStrategy
from egeria.parallel.replicas import Replicas
from egeria.parallel.single import SingleProcess

__all__ = ["ParallelStrategy", "Replicas", "SingleProcess", "choose_parallel"]
