"""Whether to store what a boundary puts out: asked from the cheapest question to the dearest, up to
the first no.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from egeria.cache.forward_modes import PaybackCheck, TimedForward
from egeria.cache.gate import Prospects, judge
from egeria.cache.generation import Generation
from egeria.cache.layout import BatchKeys, Layouts
from egeria.cache.loader import SampleFeed
from egeria.cache.samples import BatchIndices
from egeria.cache.store.directory import CacheDirectory
from egeria.cache.store.disk import DiskStore
from egeria.cache.store.file import bytes_per_position
from egeria.cache.store.rows import StoreError
from egeria.config import CacheConfig
from egeria.errors import UncacheableError
from egeria.layers.batch import Batch
from egeria.layers.freezing import checksum
from egeria.layers.modules import LayerModule
from egeria.skipping.prefix import Prefix

REPEATS = 3
"""Times that something is done to be timed; the shortest counts."""
HANDLING_S = 1.5e-3
"""What a batch from the store takes the training thread besides (measured:
benchmarks/micro/cached_iteration)."""
UNKNOWN_BYTES = 2**30
"""What a store may take where nobody knows how many samples there are."""
MANY_EPOCHS = 1000.0
"""Stands for an end that nobody knows."""
NUMBERS_PER_BOUNDARY = 100
"""Generation numbers from one boundary to the next, where processes share them."""
MAX_DEFERRALS = 200
"""Forwards after which a process decides by itself that the one that leads has stored nothing."""


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
        """Return the epochs ahead for a loader of this length, less those in which samples come to
        another host.
        """
        if self.steps_ahead is None or not num_batches:
            return MANY_EPOCHS
        epochs = self.steps_ahead * self.forwards_per_step / num_batches
        elsewhere = (
            1 - 1 / self.num_hosts
        )  # in epoch e a sample was here before with 1 - elsewhere ** (e - 1)
        missed: float = elsewhere * (1 - elsewhere ** max(0.0, epochs - 1)) / (1 - elsewhere)
        return epochs - missed


Opening = tuple[Generation | None, str, dict[str, float]]
"""A generation, or None; why, and the numbers that decided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOpener:
    """Opens a generation behind a boundary, by what was seen in the training forwards since it
    moved.

    `open` and `join` raise UncacheableError where the front cannot be skipped, and StoreError where
    the disk cannot be used.
    """

    model: nn.Module
    modules: Sequence[LayerModule]
    """The frozen ones, front to back."""
    feed: SampleFeed
    settings: CacheConfig
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

    def open(self, place: Callable[[], CacheDirectory]) -> Opening:
        """Open a generation where storing pays.

        Args:
            place: makes or returns the directory for stores.
        """
        prospects = self._foresee()
        pays, reason = self._ask_gate(prospects)
        if not pays:
            return None, reason, prospects.to_dict()
        prefix, rows, layouts = self._find_prefix()
        directory = place()
        prospects = self._size_up(prospects, layouts, directory.room_bytes())
        pays, reason = self._ask_gate(prospects)
        capacity = directory.capacity(
            layouts.stored, prospects.needed_bytes // bytes_per_position(layouts.stored)
        )
        if pays and capacity < 1:
            pays, reason = False, f"{directory.path.parent} has no room for one sample"
        if not pays:
            return None, reason, prospects.to_dict()
        store = directory.create(
            self.number,
            layouts.stored,
            capacity,
            boundary=self.modules[-1].name,
            front=checksum(prefix.weights()),
            ignores_padding=prefix.ignores_padding,
        )
        with contextlib.ExitStack() as unless_used:
            unless_used.callback(store.close)
            prospects = self._time_store(prospects, store, layouts, layouts.to_store(rows))
            pays, reason = self._ask_gate(prospects)
            if not pays:
                return None, reason, prospects.to_dict()
            generation = self._generation(prefix, layouts, store)
            unless_used.pop_all()
        hosts = {"num_hosts": float(self.outlook.num_hosts)} if self.outlook.num_hosts > 1 else {}
        return generation, reason, prospects.to_dict() | hosts

    def join(self, place: CacheDirectory) -> Opening:
        """Use the store that another process of the host has opened, if it has."""
        prefix, _, own = self._find_prefix()
        if not place.published(self.number):
            return None, "the first process of this host stores nothing", {}
        store = place.join(self.number)
        with contextlib.ExitStack() as unless_used:
            unless_used.callback(store.close)
            layouts = own.like(store.layouts)
            reason = ""
            if store.boundary != self.modules[-1].name:
                reason = f"the first process of this host stores what {store.boundary} puts out"
            elif store.front != checksum(prefix.weights()):
                reason = (
                    "the frozen layers of this process have other values, such as statistics "
                    "of its own"
                )
            elif layouts is None:
                reason = "the first process of this host stores rows of another kind"
            if layouts is None or reason:
                return None, reason, {}
            generation = self._generation(prefix, layouts, store)
            unless_used.pop_all()
        return generation, "the first process of this host has opened the store", {}

    def _find_prefix(self) -> tuple[Prefix, Sequence[torch.Tensor], Layouts]:
        """Return the frozen front, what it puts out for the batch, and how that is laid out."""
        prefix = Prefix.find(self.model, self.modules, self.batch, len(self.indices.samples))
        rows = prefix.compute(self.batch, None)
        return (
            prefix,
            rows,
            Layouts.of(prefix.row_leaves, rows, longest=self.longest),
        )

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
            spare_core=self.outlook.spare_core,
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
        if self.settings.gate == "open":
            return True, "cache.gate is 'open'"
        return judge(prospects, minimum_epochs=self.settings.minimum_epochs)

    def _size_up(self, prospects: Prospects, layouts: Layouts, room_bytes: int) -> Prospects:
        """Add what the store would take."""
        row_bytes = bytes_per_position(layouts.stored)
        num_samples = self.feed.num_samples
        if num_samples is None:  # where nobody knows, as many as fit
            num_samples = max(1, min(room_bytes, UNKNOWN_BYTES) // row_bytes)
        return replace(
            prospects,
            batch_bytes=row_bytes * len(self.indices.samples),
            needed_bytes=row_bytes * num_samples,
            room_bytes=room_bytes,
        )

    def _time_store(
        self, prospects: Prospects, store: DiskStore, layouts: Layouts, rows: Sequence[torch.Tensor]
    ) -> Prospects:
        """Write the batch and read it back from the disk itself; add the seconds
        that this takes.
        """
        has_length, ignores_padding = layouts.has_length, store.ignores_padding
        keys = self._keys(has_length=has_length, ignores_padding=ignores_padding)
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
            prospects, fill_s=fill_s, read_s=statistics.median(walls), read_cpu_s=min(cpus)
        )

    def _generation(self, prefix: Prefix, layouts: Layouts, store: DiskStore) -> Generation:
        return Generation(
            prefix=prefix,
            layouts=layouts,
            store=store,
            feed=self.feed,
            number=self.number,
            verify_batches=self.settings.verify_batches,
            payback=PaybackCheck(self.timed.iteration_s),
        )


@dataclass(kw_only=True, slots=True)
class Share:
    """The processes of a host that train one model, seen from one of them. Nobody ever waits for
    another.
    """

    is_alone: bool = True
    """Whether there is nobody to share with."""
    leads: bool = True
    """Whether this process decides and makes the stores, and others join them."""
    _num_asked: int = 0

    def number_at(self, number: int) -> int:
        """Return the number of the newest generation, now that the boundary has moved.

        It moves in all processes alike; further decisions behind one boundary may not be made by
        all.
        """
        self._num_asked = 0
        return (
            number
            if self.is_alone
            else number + NUMBERS_PER_BOUNDARY - number % NUMBERS_PER_BOUNDARY
        )

    def refusal(self, feed: SampleFeed | None) -> str:
        """Return why nothing can be shared; empty where it can."""
        if self.is_alone or feed is None or not feed.numbers_by_sight:
            return ""
        return (
            "samples are identified by a column of the batch, and each process numbers them "
            "for itself"
        )

    def decide(
        self,
        place: Callable[[], CacheDirectory],
        number: int,
        decide: Callable[[], None],
        is_opened: Callable[[], bool],
    ) -> None:
        """Decide how a generation is done, where that is this process' to say or has been said;
        else later.

        Args:
            place: returns where stores go.
            number: of the generation.
            decide: decides; what it raises passes through.
            is_opened: returns whether the generation is stored then, which is published to the
                others. Where it cannot be written, they give up.
        """
        if not self.leads:
            self._num_asked += 1
            if place().published(number) is None and self._num_asked <= MAX_DEFERRALS:
                return
        self._num_asked = 0
        try:
            decide()
        finally:
            if self.leads and not self.is_alone:
                with contextlib.suppress(StoreError):
                    place().publish(number, opened=is_opened())
