"""Checking and encoding a batch before any of it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria.cache.store.codec import Codec
from egeria.cache.store.index import ENTRY, Entries
from egeria.cache.store.rows import Integers, Mask, StoreError, as_positions


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rows of a batch that can be stored, by rising position, each position once."""

    positions: Integers
    """[n]"""
    entries: Entries
    """[n] without checksums."""
    blocks: list[list[memoryview]]
    """[n] for each row the bytes of its leaves."""
    num_unstorable: int
    """Rows whose values the storage cannot hold."""


def prepare(
    codecs: Sequence[Codec],
    positions: Any,
    rows: Sequence[Tensor],
    *,
    fingerprints: Any,
    lengths: Any,
    capacity: int,
) -> Prepared:
    """Return what of a batch of `b` rows can be stored.

    A position outside the store, or a row longer than its slot or than what was given, is left out. Of
    rows for one position the last counts.

    Raises:
        StoreError: the rows are not what the store is for.
    """
    places = as_positions(positions)
    prints = np.asarray(fingerprints, dtype=np.float32)
    check_leaves(codecs, rows, len(places))
    if prints.shape != (len(places), 2):
        raise StoreError(f"Fingerprints must be of shape {(len(places), 2)}, found {prints.shape}.")
    sizes = _lengths(codecs, rows, lengths)
    chosen = _chosen(places, (places >= 0) & (places < capacity) & have_length(codecs, sizes, rows))
    kept = [leaf if len(chosen) == len(leaf) else leaf[torch.from_numpy(chosen).to(leaf.device)] for leaf in rows]
    encoded = [codec.encode(leaf, sizes[chosen]) for codec, leaf in zip(codecs, kept, strict=True)]
    storable = np.logical_and.reduce([leaf.storable for leaf in encoded])
    order = np.flatnonzero(storable)
    order = order[np.argsort(places[chosen[order]], kind="stable")]
    entries = np.zeros(len(order), dtype=ENTRY)
    entries["length"], entries["fingerprint"] = sizes[chosen[order]], prints[chosen[order]]
    return Prepared(
        positions=places[chosen[order]],
        entries=entries,
        blocks=[[leaf.blocks[index] for leaf in encoded] for index in order],
        num_unstorable=int(len(chosen) - len(order)),
    )


def check_leaves(codecs: Sequence[Codec], tensors: Sequence[Tensor], num_rows: int) -> None:
    """Raise `StoreError` unless there is a tensor a leaf, each with so many rows."""
    found = [len(tensor) if tensor.dim() else 0 for tensor in tensors]
    if found != [num_rows] * len(codecs):
        raise StoreError(f"A batch must have {len(codecs)} leaves of {num_rows} rows, found leaves of {found} rows.")


def have_length(codecs: Sequence[Codec], lengths: Integers, room: Sequence[Tensor]) -> Mask:
    """Return which lengths [b] are possible and fit into tensors [b, ...], one a leaf."""
    fits = np.ones(len(lengths), dtype=bool)
    for codec, tensor in zip(codecs, room, strict=True):
        axis, longest = codec.layout.length_axis, codec.layout.longest
        if axis is not None and longest is not None:
            there = tensor.shape[axis + 1] if tensor.dim() > axis + 1 else 0
            fits &= (lengths > 0) & (lengths <= min(there, longest))
    return fits


def _lengths(codecs: Sequence[Codec], rows: Sequence[Tensor], lengths: Any) -> Integers:
    """Return the lengths [b]: those given, else what the rows are padded to, else zeros."""
    num_rows = len(rows[0])
    if lengths is not None:
        return np.broadcast_to(np.asarray(lengths, dtype=np.int64), (num_rows,))
    axes = ((codec.layout.length_axis, leaf) for codec, leaf in zip(codecs, rows, strict=True))
    padded = [leaf.shape[axis + 1] for axis, leaf in axes if axis is not None and leaf.dim() > axis + 1]
    return np.full(num_rows, min(padded, default=0), dtype=np.int64)


def _chosen(places: Integers, fits: Mask) -> Integers:
    """Return which rows to store, in their order: the last for each position, if it fits."""
    _, from_the_end = np.unique(places[::-1], return_index=True)
    last = np.sort(len(places) - 1 - from_the_end)
    return np.asarray(last[fits[last]], dtype=np.int64)
