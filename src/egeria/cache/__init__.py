"""Stored activations: what a frozen front puts out, kept by sample and read back ahead of its use
(paper §4.3).
"""

from egeria.cache.cache import ActivationCache
from egeria.cache.decision import Outlook
from egeria.cache.loader import SampleFeed, ShardSampler, length_of
from egeria.cache.memory import MemoryCache
from egeria.cache.samples import NoSamplesError
from egeria.cache.store.codec import StoreError

__all__ = [
    "ActivationCache",
    "MemoryCache",
    "NoSamplesError",
    "Outlook",
    "SampleFeed",
    "ShardSampler",
    "StoreError",
    "length_of",
]
