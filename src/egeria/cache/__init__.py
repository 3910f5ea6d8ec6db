"""Stored activations: what a frozen front puts out, kept by sample and read back ahead of its use (paper §4.3)."""

from egeria.cache.cache import ActivationCache
from egeria.cache.decision import Outlook
from egeria.cache.samples.feed import NoSamplesError, SampleFeed
from egeria.cache.samples.shards import ShardSampler
from egeria.cache.share import Share
from egeria.cache.store.directory import CacheDirectory
from egeria.cache.store.rows import StoreError

__all__ = [
    "ActivationCache",
    "CacheDirectory",
    "NoSamplesError",
    "Outlook",
    "SampleFeed",
    "ShardSampler",
    "Share",
    "StoreError",
]
