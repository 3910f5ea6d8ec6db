"""The store on the disk: one file a leaf, one slot a position, every row under a checksum.

A row is written in three steps: its entry is cleared, its bytes are written, its entry is set with their
checksum. So whoever is killed on the way leaves no row that looks whole, and whoever reads while a row is written, in
whatever process, finds that the checksum does not fit. The disk need not keep any of it through a
power cut: a store is never used again after its run.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from egeria.cache.store import files
from egeria.cache.store.codec import Codec
from egeria.cache.store.index import ENTRY, Entries, Index, file_bytes
from egeria.cache.store.manifest import FILE_NAME, Manifest
from egeria.cache.store.prepared import check_leaves, have_length, prepare
from egeria.cache.store.rows import Integers, Mask, RowLayout, Rows, Store, StoreError, as_positions, unchanged
from egeria.cache.store.slots import Slots
from egeria.cache.store.usage import Usage

__all__ = ["DiskStore", "RowLayout", "Rows", "Store", "StoreError", "bytes_per_position"]

INDEX_NAME = "index.bin"
VERDICTS = {True: "opened", False: "refused"}
"""Files by which the process that decides on a store tells the others of its host."""
CLOSE_TIMEOUT_S = 10.0


def bytes_per_position(layouts: Sequence[RowLayout]) -> int:
    """Return what a position takes on the disk, its entry in the index included."""
    return sum(Codec(layout).slot_bytes for layout in layouts) + ENTRY.itemsize


class DiskStore:
    """Rows of activations by position (paper §4.3). Get one from `create` or `join`.

    Any number of threads may use it at once: readers never wait for each other, writers take turns, and
    a row that is read while it is written is not served. `close` waits for those inside. Processes
    of one host may share the files; what others wrote is seen after `advise`.
    """

    def __init__(self, directory: Path, manifest: Manifest, index: Index, slots: Slots, *, own: bool) -> None:
        self.directory = directory
        self.layouts = manifest.layouts
        self.capacity = manifest.capacity
        self.boundary = manifest.boundary
        self.num_views, self.is_viewed, self.front = manifest.num_views, manifest.is_viewed, manifest.front
        self.num_damaged = 0
        """Rows found with a wrong checksum and forgotten."""
        self.num_unstorable = 0
        """Rows with values that their storage cannot hold."""
        self._index = index
        self._slots = slots
        self._own = own
        self._pid = os.getpid()
        self._usage = Usage("The store of activations")
        self._write_lock = threading.Lock()
        self._finalizer = weakref.finalize(self, files.close, [*slots.descriptors, index.descriptor])
        self._finalizer.atexit = False  # a thread may still be reading then

    @classmethod
    def create(cls, directory: Path, layouts: Sequence[RowLayout], capacity: int, **description: Any) -> DiskStore:
        """Make a store in a directory of its own, with all of its blocks on the disk.

        Args:
            directory: made if it is not there.
            layouts: of the leaves of a row.
            capacity: positions it has room for.
            description: what the `Manifest` has beside these.

        Raises:
            StoreError: there is no room, no right, or a store already. Nothing new is left behind.
        """
        if not layouts or capacity < 1:
            raise StoreError(f"A store needs a leaf and a position, found {len(layouts)} and {capacity}.")
        codecs = [Codec(layout) for layout in layouts]
        manifest = Manifest(layouts=tuple(layouts), capacity=capacity, **{"boundary": "", **description})
        with _told(f"A store of activations cannot be made in {directory}"), ExitStack() as undo:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            undo.callback(_remove_if_empty, directory)
            index = Index.make(directory / INDEX_NAME, capacity)
            undo.callback(files.discard, directory / INDEX_NAME, index.descriptor)
            descriptors = []
            for path, codec in zip(leaf_paths(directory, len(codecs)), codecs, strict=True):
                descriptors.append(files.make(path, capacity * codec.slot_bytes))
                undo.callback(files.discard, path, descriptors[-1])
            manifest.save(directory)
            undo.pop_all()
        return cls(directory, manifest, index, Slots(codecs, descriptors), own=True)

    @classmethod
    def join(cls, directory: Path, *, read_only: bool = False) -> DiskStore:
        """Open the store of another process of this host.

        Raises:
            StoreError: there is none, or it is damaged.
        """
        manifest = Manifest.load(directory)
        codecs = [Codec(layout) for layout in manifest.layouts]
        with _told(f"The store in {directory} cannot be joined"), ExitStack() as undo:
            index = Index.open(directory / INDEX_NAME, manifest.capacity, writable=not read_only)
            undo.callback(files.close, [index.descriptor])
            descriptors = []
            for path, codec in zip(leaf_paths(directory, len(codecs)), codecs, strict=True):
                size_bytes = manifest.capacity * codec.slot_bytes
                descriptors.append(files.open_sized(path, size_bytes, writable=not read_only))
                undo.callback(files.close, descriptors[-1:])
            undo.pop_all()
        return cls(directory, manifest, index, Slots(codecs, descriptors), own=False)

    @property
    def row_bytes(self) -> int:
        """What the data of a row take on the disk."""
        return self._slots.row_bytes

    @property
    def size_bytes(self) -> int:
        """What the store takes on the disk."""
        return self.capacity * self.row_bytes + file_bytes(self.capacity)

    @property
    def num_stored(self) -> int:
        """Rows that are there, as far as this process knows."""
        return len(self._index.stored())

    def lookup(self, positions: Any) -> Rows:
        """Return what is known of the positions [b]; from memory alone. Those outside the store have no row."""
        entries = self._index.look(as_positions(positions))
        lengths = entries["length"].astype(np.int64)
        return Rows(valid=entries["checksum"] != 0, fingerprints=entries["fingerprint"].copy(), lengths=lengths)

    def advise(self, positions: Any) -> None:
        """Take in what other processes wrote at these positions, and let the kernel fetch what is there.

        Raises:
            StoreError: the disk cannot be read, or the store is closed.
        """
        with self._usage.inside(), _told("The store of activations cannot be read"):
            places = as_positions(positions)
            if self._index.is_shared():
                self._index.refresh(places)
            entries = self._index.look(places)
            stored = entries["checksum"] != 0
            self._slots.advise(places[stored], entries["length"][stored])

    def read(self, positions: Any, out: Sequence[Tensor], known: Rows | None = None) -> Mask:
        """Fill `out[k][i]` for each leaf `k` and position `i`, padded with zeros.

        Args:
            positions: [b]
            out: a tensor [b, ...] a leaf, whose length may be another than at writing; contiguous ones fastest.
            known: what an earlier `lookup` of the positions returned. Rows that changed since are not
                served; without it, a caller who compared fingerprints may be given a newer row.

        Returns:
            A mask [b]. Where it is False the row is not there, damaged, just being written or longer than `out`,
            and `out` may hold anything.

        Raises:
            StoreError: the disk cannot be read, `out` is not for these rows, or the store is closed.
        """
        with self._usage.inside(), _told("The store of activations cannot be read"):
            places = as_positions(positions)
            check_leaves(self._slots.codecs, out, len(places))
            entries = self._index.look(places)
            wanted = (entries["checksum"] != 0) & have_length(self._slots.codecs, entries["length"], out)
            if known is not None:
                wanted = unchanged(known, wanted, entries["fingerprint"], entries["length"])
            landings = self._slots.landings(np.where(wanted, entries["length"], 0).astype(np.int64), out)
            order = np.flatnonzero(wanted)
            order = order[np.argsort(places[order], kind="stable")]
            self._slots.advise(places[order], entries["length"][order])
            good = self._slots.fetch(places, entries, order, [landing.blocks for landing in landings])
            for landing in landings:
                landing.settle(good)
            self._forget(places, entries, wanted & ~good)
            return good

    def write(self, positions: Any, rows: Sequence[Tensor], fingerprints: Any, lengths: Any = None) -> int:
        """Store rows; those there already are replaced.

        Args:
            positions: [b]; those outside the store are left out.
            rows: a tensor [b, ...] a leaf, which must not change meanwhile.
            fingerprints: [b, 2] of the model's input.
            lengths: [b] true lengths; None takes the rows as long as they are. Longer ones than fit are left out.

        Returns:
            How many were stored.

        Raises:
            StoreError: the disk is full or cannot be written, the rows are not what the store is for, or it is closed.
        """
        with self._usage.inside(), _told("The store of activations cannot be written"):
            codecs = self._slots.codecs
            given = {"fingerprints": fingerprints, "lengths": lengths}
            batch = prepare(codecs, positions, rows, **given, capacity=self.capacity)
            with self._write_lock:
                self.num_unstorable += batch.num_unstorable
                self._index.clear(batch.positions)
                batch.entries["checksum"] = self._slots.put(batch)
                self._index.put(batch.positions, batch.entries)
            return len(batch.positions)

    def verify(self, chunk: int = 256) -> tuple[int, int]:
        """Read every stored row and return how many there are and how many are damaged; nothing is changed.

        Raises:
            StoreError: the disk cannot be read, or the store is closed.
        """
        num_damaged = 0
        with self._usage.inside(), _told("The store of activations cannot be read"):
            stored = self._index.stored()
            for begin in range(0, len(stored), chunk):
                places = stored[begin : begin + chunk]
                entries = self._index.look(places)
                bad = ~self._slots.check(places, entries)
                self._index.refresh(places[bad])  # one that was rewritten meanwhile is not damaged
                again = self._index.look(places[bad])
                num_damaged += int((again["checksum"] == entries["checksum"][bad]).sum())
        return len(stored), num_damaged

    def drop_pages(self) -> None:
        """Let the next read come from the disk itself, to see how fast that is.

        Raises:
            StoreError: the disk cannot be written, or the store is closed.
        """
        with self._usage.inside(), _told("The store of activations cannot be written"):
            for descriptor in self._slots.descriptors:
                files.forget_pages(descriptor)

    def close(self, *, remove: bool = True) -> None:
        """Wait for those inside and let go of the files; with `remove` whoever made the store deletes it.

        Another process that joined goes on with what it has open.
        """
        if os.getpid() != self._pid:  # a forked child has a copy, whose locks a thread of the parent may have held
            self._finalizer()
            return
        if self._usage.end(CLOSE_TIMEOUT_S):
            self._finalizer()
        if remove and self._own:
            remove_store(self.directory)

    def _forget(self, places: Integers, entries: Entries, damaged: Mask) -> None:
        if damaged.any():
            self.num_damaged += self._index.clear_unchanged(places[damaged], entries[damaged])


def leaf_paths(directory: Path, num_leaves: int) -> list[Path]:
    """Return the files of the leaves."""
    return [directory / f"leaf-{leaf}.bin" for leaf in range(num_leaves)]


def remove_store(directory: Path) -> None:
    """Delete the files of a store, the manifest first, and nothing else; what cannot be deleted stays."""
    with contextlib.suppress(OSError):
        manifests = [directory / FILE_NAME, *directory.glob(f".{FILE_NAME}")]
        verdicts = [directory / name for name in VERDICTS.values()]
        for path in (*manifests, *verdicts, *directory.glob("leaf-*.bin"), directory / INDEX_NAME):
            with contextlib.suppress(OSError):
                path.unlink()
        directory.rmdir()


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn what the operating system says into a `StoreError`."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what}: {error}.") from error
