"""How many processes train together, and what cannot be frozen then."""

from __future__ import annotations

from egeria.parallel.refusals import COMPILED_SHARDS, refuse_plasticity
from egeria.parallel.strategies import (
    ParallelStrategy,
    Replicas,
    Sharded,
    SingleProcess,
    choose_parallel,
)

__all__ = [
    "COMPILED_SHARDS",
    "ParallelStrategy",
    "Replicas",
    "Sharded",
    "SingleProcess",
    "choose_parallel",
    "refuse_plasticity",
]
