"""How the frozen forward pass is done, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from egeria.events.event import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheDecided(Event):
    """How the frozen forward pass is done from here on, and the numbers that decided."""

    kind: ClassVar[str] = "cache"
    boundary: str
    """Name of the last frozen layer module; empty while nothing is frozen."""
    generation: int
    mode: str
    """'stored' (activations from the disk), 'inference' (computed, with folded normalisation) or 'computed'."""
    reason: str
    numbers: dict[str, float]
    """What the gate weighed: seconds of a mini-batch, bytes, epochs; empty where it was not asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUsed(Event):
    """What became of one generation of stored activations, from its beginning to this step."""

    kind: ClassVar[str] = "cache_used"
    boundary: str
    generation: int
    hits: int
    """Samples that came from the store."""
    misses: int
    """Samples whose activations were computed."""
    mismatches: int
    """Of these, the ones stored for another input: a changed data set or transform."""
    batches: int
    stalls: int
    """Batches that had to wait for the disk."""
    stall_s: float
    bytes_read: int
    bytes_written: int
    size_bytes: int
    dropped_writes: int
    """Batches that were not stored because the disk had not finished with those before."""
    checks: int
    """Batches whose stored activations were compared with computed ones."""
    largest_error: float
    """Of those checks, relative."""
    damaged: int = 0
    """Stored samples that were found damaged; they count as misses."""
    thread_cpu_s: float
    """CPU seconds of the reading and writing threads; they are part of the process's own."""
