"""The activation cache: what a frozen front gives, stored and given back (paper §4.3)."""

from egeria.cache.cache import Cache
from egeria.cache.loader import ShardSampler

__all__ = ["Cache", "ShardSampler"]
