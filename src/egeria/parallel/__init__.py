"""How many processes train together: what a frozen prefix means for them."""

from egeria.parallel.single import ParallelStrategy, SingleProcess

__all__ = ["ParallelStrategy", "SingleProcess"]
