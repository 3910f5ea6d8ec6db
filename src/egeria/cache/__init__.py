"""Stored activations: what a frozen front puts out, kept by sample and read back ahead of its use
(paper §4.3).
"""

from egeria.cache.cache import ActivationCache
from egeria.cache.decision import Outlook, Share
from egeria.cache.loader import SampleFeed, length_of
from egeria.cache.memory import MemoryCache
from egeria.cache.sampler import ShardSampler
from egeria.cache.samples import NoSamplesError
from egeria.cache.store.directory import CacheDirectory
from egeria.cache.store.rows import StoreError

__all__ = [
    "ActivationCache",
    "CacheDirectory",
    "MemoryCache",
    "NoSamplesError",
    "Outlook",
    "SampleFeed",
    "ShardSampler",
    "Share",
    "StoreError",
    "length_of",
]
