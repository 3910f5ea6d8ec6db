"""Shared memory between the training process and the controller process, and the queues in it
(paper §4.1.2).

Segments of memory have no name, so that nothing is left behind however the two processes end. A
packed object is a pickle in which tensors are replaced by where their values lie after it: they are
copied once, from any device. Classes of the user's script travel by value (cloudpickle), so the
other process never runs the script again.
"""

from __future__ import annotations

import copyreg
import io
import math
import mmap
import os
import pickle
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn

from egeria.layers.copies import without_ours, without_wrappers

BLOCK_BYTES = 64 * 1024
ALIGNMENT = 64
HEADER_BYTES = 8
DROPPED_HOOKS = {name for name in vars(nn.Module()) if name.endswith("_hooks")} - {
    "_forward_pre_hooks"
}
PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


class Segment:
    """Shared memory behind a file descriptor: one side makes and writes it, the other inherits the
    descriptor.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous_file() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        self._finalizer.atexit = (
            False  # at the end of the process others may still want to read from it
        )

    def map(self, size_bytes: int) -> mmap.mmap:
        """Return the memory, made large enough; an OSError if there is not that much."""
        found = os.fstat(self.descriptor).st_size
        if found < size_bytes:
            _allocate(self.descriptor, found, _aligned(size_bytes, BLOCK_BYTES))
        if self._map is None or len(self._map) < size_bytes:
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return self._map

    def close(self) -> None:
        """Release the descriptor; the memory itself goes when the other side has
        released it too.
        """
        self._map = None
        self._finalizer()


def _allocate(descriptor: int, begin: int, end: int) -> None:
    """Make a file larger for real: a write into a hole that finds no memory would
    kill the process.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, end)
        return
    while begin < end:
        begin += os.pwrite(descriptor, bytes(min(BLOCK_BYTES, end - begin)), begin)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("egeria", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # elsewhere a file without a name does the same
        return os.dup(file.fileno())


class Slot(NamedTuple):
    """Where an object lies in a queue, and its size."""

    number: int
    size_bytes: int


class SharedQueue:
    """The producer's end of a bounded queue of one segment per slot; a full queue refuses, nobody
    waits.
    """

    def __init__(self, length: int) -> None:
        self.segments = [Segment() for _ in range(length)]
        self.free = set(range(length))

    def put(self, thing: Any) -> Slot | None:
        """Queue an object; None if the queue is full. Where packing raises, the
        queue is as before.
        """
        if not self.free:
            return None
        number = min(self.free)
        slot = Slot(number, pack(thing, self.segments[number]))
        self.free.discard(number)
        return slot

    def empty(self, *, but: Slot | None = None) -> None:
        """Free every slot but one: the consumer is gone."""
        self.free = set(range(len(self.segments))) - ({but.number} if but else set())

    def close(self) -> None:
        """Release the memory."""
        for segment in self.segments:
            segment.close()


class TensorLocation(NamedTuple):
    """Where a tensor's values lie after the pickle, and what it is."""

    begin: int | None
    """Bytes after the pickle; None for one that arrives as zeros."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool

    def view(self, memory: Any, offset: int) -> Tensor:
        """Return the tensor in the memory, whose values begin at an offset."""
        assert self.begin is not None
        count = math.prod(self.shape)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=offset + self.begin)
        return flat.as_strided(self.shape, self.strides)


def pack(thing: Any, segment: Segment, *, without_values: Collection[Tensor] = ()) -> int:
    """Put an object into the segment and return how many bytes it takes there; tensors
    `without_values` become zeros.

    Of modules the hooks stay behind that only observe or save; pre-hooks are sent too, since some
    compute weights, but not our own on a frozen layer.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, {id(tensor) for tensor in without_values})
    pickler.dump(thing)
    pickled = file.getbuffer()
    begin = _aligned(HEADER_BYTES + len(pickled))
    memory = segment.map(begin + pickler.size_bytes)
    memory[:HEADER_BYTES] = len(pickled).to_bytes(HEADER_BYTES, "little")
    memory[HEADER_BYTES : HEADER_BYTES + len(pickled)] = pickled
    for tensor, location in pickler.tensors.values():
        if tensor.numel() and location.begin is not None:
            location.view(memory, begin).copy_(tensor.detach())
    return begin + pickler.size_bytes


def unpack(segment: Segment, size_bytes: int) -> Any:
    """Return what was packed; its tensors are copies of their own, on the CPU, without gradient."""
    memory = segment.map(size_bytes)
    length = int.from_bytes(memory[:HEADER_BYTES], "little")
    pickled = memory[HEADER_BYTES : HEADER_BYTES + length]
    return _Unpickler(io.BytesIO(pickled), memory, _aligned(HEADER_BYTES + length)).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves plain tensors out and notes where they go; one that appears twice goes once."""

    def __init__(self, file: io.BytesIO, without_values: set[int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._without_values = without_values
        self.tensors: dict[int, tuple[Tensor, TensorLocation]] = {}
        """By id, with the tensors: an id is unique only among the living."""
        self.size_bytes = 0

    def persistent_id(self, thing: Any) -> tuple[int, TensorLocation] | None:
        if (
            type(thing) not in PLAIN_TENSORS
            or thing.layout is not torch.strided
            or thing.is_quantized
            or thing.is_meta
        ):
            return None
        key = id(thing)
        if key not in self.tensors:
            strides = torch.empty_like(
                thing, device="meta"
            ).stride()  # without gaps, channels_last as it is
            begin = None if key in self._without_values else self.size_bytes
            location = TensorLocation(
                begin, tuple(thing.shape), strides, thing.dtype, isinstance(thing, nn.Parameter)
            )
            self.tensors[key] = thing, location
            if begin is not None:
                self.size_bytes += _aligned(thing.nbytes)
        return key, self.tensors[key][1]

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, nn.Module):
            return super().reducer_override(thing)
        try:
            make, arguments, state, *rest = (*thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL), None)[
                :6
            ]
        except (
            RuntimeError
        ):  # parametrized modules refuse, for the sake of files that outlive their classes
            make, arguments, state, rest = copyreg.__newobj__, (type(thing),), vars(thing), []  # type: ignore[attr-defined]
        if isinstance(state, dict):
            state = without_wrappers(without_ours(state))
            state = {
                name: OrderedDict() if name in DROPPED_HOOKS else value
                for name, value in state.items()
            }
        return (make, arguments, state, *rest[:3])


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Any, begin: int) -> None:
        super().__init__(file)
        self._memory, self._begin = memory, begin
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, name: tuple[int, TensorLocation]) -> Tensor:
        key, location = name
        if key not in self._tensors:
            if location.begin is None or not math.prod(location.shape):
                tensor = torch.empty_strided(
                    location.shape, location.strides, dtype=location.dtype
                ).zero_()
            else:
                tensor = location.view(self._memory, self._begin).clone()
            self._tensors[key] = (
                nn.Parameter(tensor, requires_grad=False) if location.is_parameter else tensor
            )
        return self._tensors[key]


def _aligned(size_bytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-size_bytes // alignment) * alignment
