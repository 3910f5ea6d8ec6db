"""Whether to store what a boundary puts out on the disk: asked from the cheapest question to the
dearest, up to the first no.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from egeria.cache.forward_modes import PaybackCheck, TimedForward
from egeria.cache.gate import Prospects, judge
from egeria.cache.generation import Generation
from egeria.cache.layout import BatchKeys, Layouts
from egeria.cache.loader import SampleFeed
from egeria.cache.samples import BatchIndices
from egeria.cache.store.codec import RowCodec, as_store_error
from egeria.cache.store.disk import DiskStore
from egeria.config import CacheConfig
from egeria.errors import UncacheableError
from egeria.model.batch import Batch
from egeria.model.cut import LayerModule
from egeria.skipping.prefix import Prefix

REPEATS = 3
"""Times that something is done to be timed; the shortest counts."""
HANDLING_S = 1.5e-3
"""What a batch from the store takes the training thread besides (measured:
benchmarks/micro/cached_iteration)."""
MANY_EPOCHS = 1000.0
"""Stands for an end that nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What the session knows about the time to come."""

    steps_ahead: float | None
    """Steps before the boundary can move or the run ends; None where nobody knows."""
    forwards_per_step: float = 1.0
    """Training forwards between two steps of the optimizer."""

    def epochs(self, num_batches: int | None) -> float:
        """Return the epochs ahead for a loader of this length."""
        if self.steps_ahead is None or not num_batches:
            return MANY_EPOCHS
        return self.steps_ahead * self.forwards_per_step / num_batches


Opening = tuple[Generation | None, str, dict[str, float]]
"""A generation, or None; why, and the numbers that decided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOpener:
    """Opens a generation behind a boundary, by what was seen in the training forwards since it
    moved.
    """

    model: nn.Module
    modules: Sequence[LayerModule]
    """The frozen ones, front to back."""
    feed: SampleFeed
    settings: CacheConfig
    directory: Path
    """Where the store goes."""
    batch: Batch
    """A training batch."""
    indices: BatchIndices
    """Its samples."""
    timed: TimedForward
    """The iterations before it."""
    outlook: Outlook
    longest: int | None
    """The greatest padded length so far."""
    number: int
    """Of the generation."""

    def open(self) -> Opening:
        """Open a generation where storing pays.

        Raises UncacheableError where the front cannot be skipped, and StoreError where the disk
        cannot be used.
        """
        prospects = self._foresee()
        pays, reason = self._ask_gate(prospects)
        if not pays:
            return None, reason, prospects.to_dict()
        prefix = Prefix.find(self.model, self.modules, self.batch, len(self.indices.samples))
        rows = prefix.compute(self.batch, None)
        layouts = Layouts.of(prefix.row_leaves, rows, longest=self.longest)
        row_bytes, room_bytes = RowCodec(layouts.stored).row_bytes, self._room_bytes()
        needed_bytes = row_bytes * self.feed.num_samples
        prospects = replace(prospects, needed_bytes=needed_bytes, room_bytes=room_bytes)
        pays, reason = self._ask_gate(prospects)
        capacity = min(self.feed.num_samples, room_bytes // row_bytes)
        if pays and capacity < 1:
            pays, reason = False, f"{self.directory} has no room for one sample"
        if not pays:
            return None, reason, prospects.to_dict()
        store = DiskStore(self.directory, layouts.stored, capacity)
        try:
            prospects = self._time_store(prospects, store, prefix, layouts.to_store(rows))
            pays, reason = self._ask_gate(prospects)
            found = self._generation(prefix, layouts, store) if pays else None
        except BaseException:
            store.close()
            raise
        if found is None:
            store.close()
        return found, reason, prospects.to_dict()

    def _foresee(self) -> Prospects:
        """Return what is known of storing before anything is tried out."""
        seconds = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            self._keys(has_length=True, ignores_padding=False)
            seconds.append(time.perf_counter() - begin)
        return Prospects(
            iteration_s=self.timed.iteration_s,
            prefix_s=self.timed.prefix_s,
            serve_s=min(seconds) + HANDLING_S,
            epochs_ahead=self.outlook.epochs(self.feed.num_batches),
        )

    def _keys(self, *, has_length: bool, ignores_padding: bool) -> BatchKeys:
        """Return what the rows of the batch are known by, as in every forward to come."""
        keys = BatchKeys.of(
            self.batch, self.indices, has_length=has_length, ignores_padding=ignores_padding
        )
        if keys is None:
            raise UncacheableError("the input of the model cannot be told apart by sample")
        return keys

    def _ask_gate(self, prospects: Prospects) -> tuple[bool, str]:
        return (True, "cache.gate is 'open'") if self.settings.gate == "open" else judge(prospects)

    def _room_bytes(self) -> int:
        """Return what a new store may take now."""
        with as_store_error(f"The cache directory {self.directory} cannot be used"):
            self.directory.mkdir(parents=True, exist_ok=True)
            room = int(shutil.disk_usage(self.directory).free * self.settings.limit_share)
        return room if self.settings.limit_bytes is None else min(room, self.settings.limit_bytes)

    def _time_store(
        self, prospects: Prospects, store: DiskStore, prefix: Prefix, rows: Sequence[torch.Tensor]
    ) -> Prospects:
        """Write the batch and read it back from the disk itself; add the seconds
        that this takes.
        """
        has_length = any(layout.length_axis is not None for layout in store.layouts)
        keys = self._keys(has_length=has_length, ignores_padding=prefix.ignores_padding)
        begin = time.perf_counter()
        store.write(keys.positions, [leaf.clone() for leaf in rows], keys.prints, keys.lengths)
        fill_s = time.perf_counter() - begin
        walls, cpus = [], []
        out = [torch.empty_like(leaf, device="cpu").contiguous() for leaf in rows]
        for _ in range(REPEATS):
            store.drop_pages()
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            store.read(keys.positions, out)
            walls.append(time.perf_counter() - begin)
            cpus.append(time.thread_time() - begin_cpu)
        return replace(
            prospects,
            serve_s=prospects.serve_s + min(cpus),
            fill_s=fill_s,
            read_s=statistics.median(walls),
        )

    def _generation(self, prefix: Prefix, layouts: Layouts, store: DiskStore) -> Generation:
        return Generation(
            prefix=prefix,
            layouts=layouts,
            store=store,
            feed=self.feed,
            boundary=self.modules[-1].name,
            number=self.number,
            verify_batches=self.settings.verify_batches,
            payback=PaybackCheck(self.timed.iteration_s),
        )
