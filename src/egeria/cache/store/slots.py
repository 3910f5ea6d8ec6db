"""The data of a store: a file a leaf, in which every position has a slot of the same size."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from egeria.cache.store import files
from egeria.cache.store.codec import Codec, Landing
from egeria.cache.store.index import Entries, seals
from egeria.cache.store.prepared import Prepared
from egeria.cache.store.rows import Integers, Mask


class Slots:
    """Moves the bytes of rows. It keeps nothing in memory, so that threads may use it at once."""

    def __init__(self, codecs: Sequence[Codec], descriptors: Sequence[int]) -> None:
        self.codecs = tuple(codecs)
        self.descriptors = tuple(descriptors)
        self.row_bytes = sum(codec.slot_bytes for codec in codecs)

    def landings(self, lengths: Integers, out: Sequence[Tensor]) -> list[Landing]:
        """Return where rows of these lengths [b] go on their way to `out`.

        Raises:
            StoreError: `out` is not for these rows.
        """
        return [codec.landing(leaf, lengths) for codec, leaf in zip(self.codecs, out, strict=True)]

    def advise(self, places: Integers, lengths: Integers) -> None:
        """Ask the kernel to fetch the rows at these places [b]."""
        for codec, descriptor in zip(self.codecs, self.descriptors, strict=True):
            offsets = (places * codec.slot_bytes).tolist()
            sizes = codec.sizes(np.clip(lengths, 0, codec.layout.longest)).tolist()
            files.advise_wanted(descriptor, zip(offsets, sizes, strict=True))

    def fetch(
        self, places: Integers, entries: Entries, order: Integers, blocks: Sequence[Sequence[memoryview]]
    ) -> Mask:
        """Fill `blocks[k][i]` for each leaf `k` and row `i` of `order`; return a mask [b] of those that are whole.

        Raises:
            OSError: the disk cannot be read.
        """
        good = np.zeros(len(places), dtype=bool)
        offsets, checksums = places.tolist(), entries["checksum"].tolist()
        leaves = [
            (descriptor, codec.slot_bytes, parts)
            for descriptor, codec, parts in zip(self.descriptors, self.codecs, blocks, strict=True)
        ]
        for row, begun in zip(order.tolist(), seals(places[order], entries[order]), strict=True):
            checksum = begun
            for descriptor, slot_bytes, parts in leaves:
                if not files.read_fully(descriptor, parts[row], offsets[row] * slot_bytes):
                    break
                checksum = zlib.crc32(parts[row], checksum)
            else:
                good[row] = _entered(checksum) == checksums[row]
        return good

    def check(self, places: Integers, entries: Entries) -> Mask:
        """Return which rows are whole, without looking at what they say. Raises `OSError`."""
        possible = np.ones(len(places), dtype=bool)
        for codec in self.codecs:
            if codec.layout.longest is not None:
                possible &= (entries["length"] > 0) & (entries["length"] <= codec.layout.longest)
        lengths = np.where(possible, entries["length"], 0).astype(np.int64)
        blocks = [codec.memory(lengths)[1] for codec in self.codecs]
        return self.fetch(places, entries, np.flatnonzero(possible), blocks)

    def put(self, batch: Prepared) -> list[int]:
        """Write rows and return their checksums.

        Raises:
            OSError: the disk is full or cannot be written.
        """
        checksums = seals(batch.positions, batch.entries)
        for row, (position, parts) in enumerate(zip(batch.positions.tolist(), batch.blocks, strict=True)):
            for descriptor, codec, block in zip(self.descriptors, self.codecs, parts, strict=True):
                files.write_fully(descriptor, block, position * codec.slot_bytes)
                checksums[row] = zlib.crc32(block, checksums[row])
        return [_entered(checksum) for checksum in checksums]


def _entered(checksum: int) -> int:
    """Return the checksum as it stands in the index, where 0 means that there is no row."""
    return checksum or 1
