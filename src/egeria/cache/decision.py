"""Measuring what storing the activations of a boundary would bring, and opening the store where it pays."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from egeria.cache.gate import Prospects, Verdict, judge
from egeria.cache.layout import Layouts
from egeria.cache.samples.feed import Drawn, SampleFeed
from egeria.cache.samples.fingerprint import fingerprints, true_lengths
from egeria.cache.store.directory import CacheDirectory
from egeria.cache.store.disk import DiskStore
from egeria.cache.store.file import bytes_per_position
from egeria.config import CacheConfig
from egeria.layers.batch import Batch
from egeria.layers.skipping.prefix import Prefix
from egeria.layers.sources import checksum

REPEATS = 3
"""Times that something is done to be timed; the shortest counts."""
HANDLING_S = 1.5e-3
"""What a batch from the store takes the training thread besides (measured: benchmarks/micro/cached_iteration)."""
UNKNOWN_BYTES = 2**30
"""What a store may take where nobody knows how many samples there are."""
MANY_EPOCHS = 1000.0
"""Stands for an end that nobody knows."""
ROOMY_VIEWS = 4
"""Views of a sample where there is room and time."""
LONG_AHEAD = 12.0
"""Epochs ahead that make that many views worth their filling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What the session knows about the time to come."""

    steps_ahead: float | None
    """Steps before the boundary can move or the run ends; None where nobody knows."""
    forwards_per_step: float = 1.0
    """Training forwards between two steps of the optimizer."""
    spare_core: bool = True
    """Whether a thread beside the training has a core to itself."""
    num_hosts: int = 1
    """Hosts that a sample may come to, each with a store of its own."""

    def epochs(self, num_batches: int | None) -> float:
        """Return the epochs ahead for a loader of this length, less those in which samples come to another host."""
        if self.steps_ahead is None or not num_batches:
            return MANY_EPOCHS
        epochs = self.steps_ahead * self.forwards_per_step / num_batches
        elsewhere = 1 - 1 / self.num_hosts  # in epoch e a sample was here before with 1 - elsewhere ** (e - 1)
        missed: float = elsewhere * (1 - elsewhere ** max(0.0, epochs - 1)) / (1 - elsewhere)
        return epochs - missed


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A store that pays, with its first batch in it."""

    store: DiskStore
    layouts: Layouts
    num_views: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the gate said, the numbers it went by, and the store if it is open."""

    verdict: Verdict
    prospects: Prospects
    opened: Opened | None = None


def foresee(
    batch: Batch, drawn: Drawn, feed: SampleFeed, *, outlook: Outlook, iteration_s: float, prefix_s: float
) -> Prospects:
    """Return what is known of storing before anything is tried out.

    Args:
        batch: a training batch.
        drawn: its samples.
        feed: the loader.
        outlook: the time to come.
        iteration_s: of the iterations as they are now; 0 where that is not known.
        prefix_s: of that, the frozen front.
    """
    num_rows = len(drawn.samples)

    def tell_apart() -> None:
        fingerprints(batch.args, batch.kwargs, num_rows)
        true_lengths(batch.kwargs, num_rows)

    return Prospects(
        iteration_s=iteration_s,
        prefix_s=prefix_s,
        serve_s=_shortest(tell_apart) + HANDLING_S,
        spare_core=outlook.spare_core,
        epochs_ahead=outlook.epochs(feed.num_batches),
    )


def weigh(prospects: Prospects, settings: CacheConfig) -> Verdict:
    """Return what the gate says, as it is set."""
    if settings.gate == "open":
        return Verdict(pays=True, reason="cache.gate is 'open'")
    return judge(prospects, minimum_epochs=settings.minimum_epochs)


class Surveyor:
    """Measures the disk with one training batch, and leaves the store open where it pays.

    Args:
        prefix: the frozen front.
        batch: a training batch.
        drawn: its samples.
        feed: the loader.
        settings: of the cache.
    """

    def __init__(self, prefix: Prefix, batch: Batch, drawn: Drawn, feed: SampleFeed, settings: CacheConfig) -> None:
        self._batch = batch
        self._drawn = drawn
        self._feed = feed
        self._settings = settings
        self._leaves = prefix.row_leaves
        self._front = checksum(prefix.weights())
        self._rows = prefix.compute(batch, None)

    def survey(
        self,
        place: CacheDirectory,
        prospects: Prospects,
        *,
        number: int,
        boundary: str,
        repeating: bool,
        longest: int | None,
    ) -> Decision:
        """Return whether to store, with the store open if so.

        Args:
            place: where the store goes.
            prospects: what is known already.
            number: of the generation.
            boundary: name of the last frozen layer module.
            repeating: whether a sample comes with the same input each time.
            longest: the greatest padded length seen so far.

        Raises:
            StoreError: the disk cannot be used.
        """
        layouts = Layouts.of(self._leaves, self._rows, storage=self._settings.storage, longest=longest)
        row_bytes, room_bytes = bytes_per_position(layouts.stored), place.room_bytes()
        views = self._choose_views(prospects.epochs_ahead, repeating, row_bytes, room_bytes)
        wanted = self._num_samples(room_bytes, row_bytes * views) * views
        prospects = replace(
            prospects,
            num_views=views,
            batch_bytes=row_bytes * len(self._drawn.samples),
            needed_bytes=row_bytes * wanted,
            room_bytes=room_bytes,
        )
        verdict = weigh(prospects, self._settings)
        capacity = place.capacity(layouts.stored, wanted)
        if not verdict.pays or capacity < 1:
            reason = verdict.reason if not verdict.pays else f"{place.path.parent} has no room for a single sample"
            return Decision(verdict=Verdict(pays=False, reason=reason), prospects=prospects)
        description = {"boundary": boundary, "num_views": views, "is_viewed": not repeating, "front": self._front}
        store = place.create(number, layouts.stored, capacity, **description)
        return self._try_out(Opened(store=store, layouts=layouts, num_views=views), prospects)

    def _try_out(self, opened: Opened, prospects: Prospects) -> Decision:
        """Measure the disk, and close the store again where it is too slow."""
        try:
            fill_s, read_s, read_cpu_s = self._time_store(opened.store, opened.layouts, opened.num_views)
        except BaseException:
            opened.store.close(remove=True)
            raise
        prospects = replace(prospects, fill_s=fill_s, read_s=read_s, read_cpu_s=read_cpu_s)
        verdict = weigh(prospects, self._settings)
        if verdict.pays:
            return Decision(verdict=verdict, prospects=prospects, opened=opened)
        opened.store.close(remove=True)
        return Decision(verdict=verdict, prospects=prospects)

    def _choose_views(self, epochs_ahead: float, repeating: bool, row_bytes: int, room_bytes: int) -> int:
        if self._settings.views is not None:
            return self._settings.views
        if repeating or self._feed.views_refusal:
            return 1
        fits = self._feed.num_samples is None or self._feed.num_samples * row_bytes * ROOMY_VIEWS <= room_bytes
        return ROOMY_VIEWS if fits and epochs_ahead >= LONG_AHEAD else 2

    def _num_samples(self, room_bytes: int, sample_bytes: int) -> int:
        """Return how many samples there are; where nobody knows, as many as fit."""
        known = self._feed.num_samples
        return max(1, min(room_bytes, UNKNOWN_BYTES) // sample_bytes) if known is None else known

    def _time_store(self, store: DiskStore, layouts: Layouts, num_views: int) -> tuple[float, float, float]:
        """Write the batch and read it back from the disk itself; return the seconds of both, then CPU's of reading."""
        num_rows = len(self._drawn.samples)
        lengths = true_lengths(self._batch.kwargs, num_rows) if layouts.has_length else None
        prints = fingerprints(self._batch.args, self._batch.kwargs, num_rows)
        positions = self._drawn.samples * num_views + self._drawn.views
        rows = layouts.to_store(self._rows)
        begin = time.perf_counter()
        store.write(positions, [leaf.clone() for leaf in rows], prints, lengths)
        fill_s = time.perf_counter() - begin
        walls, cpus = [], []
        out = [torch.empty_like(leaf, device="cpu").contiguous() for leaf in rows]
        for _ in range(REPEATS):
            store.drop_pages()
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            store.read(positions, out)
            walls.append(time.perf_counter() - begin)
            cpus.append(time.thread_time() - begin_cpu)
        return fill_s, statistics.median(walls), min(cpus)


def _shortest(action: Callable[[], object]) -> float:
    found = math.inf
    for _ in range(REPEATS):
        begin = time.perf_counter()
        action()
        found = min(found, time.perf_counter() - begin)
    return found
