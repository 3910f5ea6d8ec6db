"""Shared memory between the training process and the controller process, and the queues in it (paper §4.1.2).

Models, batches and activations are packed into segments of memory that have no name, so that nothing is left
behind however the two processes end. A packed object is a pickle in which tensors are replaced by where their
values lie after it: they are copied once, from whatever device they are on. Classes of the user's script or
notebook travel by value (cloudpickle), so the other process never runs the script again.
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

from egeria.layers.taps import is_ours

BLOCK_BYTES = 64 * 1024
ALIGNMENT = 64
HEADER_BYTES = 8
DROPPED_HOOKS = (
    "_forward_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


class Slot(NamedTuple):
    """Where an object lies in a queue, and its size."""

    number: int
    size_bytes: int


class SharedQueue:
    """The producer's end of a bounded queue: one segment for each slot; the slot's number travels over the pipe.

    The producer never waits: a full queue refuses.

    Args:
        length: how many objects it holds.
    """

    def __init__(self, length: int) -> None:
        self.segments = [Segment() for _ in range(length)]
        self.free = set(range(length))

    def put(self, thing: Any, *, without_values: Collection[Tensor] = ()) -> Slot | None:
        """Queue an object; None if the queue is full.

        Args:
            thing: what to queue.
            without_values: tensors of it that arrive as zeros.

        Raises:
            Exception: it cannot be packed; the queue is as before.
        """
        if not self.free:
            return None
        number = min(self.free)
        slot = Slot(number, pack(thing, self.segments[number], without_values=without_values))
        self.free.discard(number)
        return slot

    def empty(self, *, but: Slot | None = None) -> None:
        """Free every slot but one: the consumer is gone."""
        self.free = set(range(len(self.segments))) - ({but.number} if but else set())

    def close(self) -> None:
        """Release the memory."""
        for segment in self.segments:
            segment.close()


class Segment:
    """Shared memory behind a file descriptor that the child process inherits.

    One side writes and may let it grow, the other maps what is there.

    Args:
        descriptor: of a segment that the other side made; None makes a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous_file() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        self._finalizer.atexit = False  # at the end of the process others may still want to read from it

    def reserve(self, size_bytes: int) -> mmap.mmap:
        """Return the memory, made large enough.

        Raises:
            OSError: there is not that much.
        """
        found = os.fstat(self.descriptor).st_size
        if found < size_bytes:
            _allocate(self.descriptor, found, _aligned(size_bytes, BLOCK_BYTES))
        return self.map(size_bytes)

    def map(self, size_bytes: int) -> mmap.mmap:
        """Return the memory, of which at least `size_bytes` were reserved."""
        if self._map is None or len(self._map) < size_bytes:
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return self._map

    def close(self) -> None:
        """Release the descriptor; the memory itself goes when the other side has released it too."""
        self._map = None
        self._finalizer()


def _allocate(descriptor: int, begin: int, end: int) -> None:
    """Make a file larger for real: a write into a hole that finds no memory would kill the process."""
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


# --- packing -----------------------------------------------------------------------------------


class TensorLocation(NamedTuple):
    """Where a tensor's values lie after the pickle, and what it is."""

    begin: int | None
    """Bytes after the pickle; None for one that comes without its values."""
    shape: tuple[int, ...]
    """In the order of memory."""
    order: tuple[int, ...]
    """The dimensions from the outermost in memory to the innermost."""
    dtype: torch.dtype
    is_parameter: bool


def pack(thing: Any, segment: Segment, *, without_values: Collection[Tensor] = ()) -> int:
    """Put an object into the segment and return how many bytes it takes there.

    Of modules the hooks stay behind that only observe or save; pre-hooks are sent too, since some compute weights,
    but not our own on a frozen layer.

    Args:
        thing: what to pack.
        segment: where to.
        without_values: tensors of it that arrive as zeros.

    Raises:
        Exception: whatever its pickling raises.
        OSError: there is no memory left.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, {id(tensor) for tensor in without_values})
    pickler.dump(thing)
    pickled = file.getbuffer()
    begin = _aligned(HEADER_BYTES + len(pickled))
    memory = segment.reserve(begin + pickler.size_bytes)
    memory[:HEADER_BYTES] = len(pickled).to_bytes(HEADER_BYTES, "little")
    memory[HEADER_BYTES : HEADER_BYTES + len(pickled)] = pickled
    with torch.no_grad():
        for tensor, location in zip(pickler.tensors, pickler.locations, strict=True):
            if tensor.numel() and location.begin is not None:
                _window(memory, begin, location).copy_(tensor.permute(location.order))
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
        self.tensors: list[Tensor] = []
        self.locations: list[TensorLocation] = []
        self.size_bytes = 0
        self._known: dict[int, tuple[int, Tensor]] = {}  # the tensor too: an id is unique only among the living

    def persistent_id(self, thing: Any) -> tuple[int, TensorLocation] | None:
        if type(thing) not in PLAIN_TENSORS or thing.layout is not torch.strided or thing.is_quantized or thing.is_meta:
            return None
        if id(thing) not in self._known:
            self._known[id(thing)] = len(self.tensors), thing
            order = _memory_order(thing)
            shape = tuple(thing.shape[dim] for dim in order)
            begin = None if id(thing) in self._without_values else self.size_bytes
            self.locations.append(TensorLocation(begin, shape, order, thing.dtype, isinstance(thing, nn.Parameter)))
            self.tensors.append(thing.detach())
            if begin is not None:
                self.size_bytes += _aligned(thing.numel() * thing.element_size())
        index, _ = self._known[id(thing)]
        return index, self.locations[index]

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, nn.Module):
            return super().reducer_override(thing)
        try:
            make, arguments, state, *rest = (*thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL), None)[:6]
        except RuntimeError:  # parametrized modules refuse, for the sake of files that outlive their classes
            make, arguments, state, rest = copyreg.__newobj__, (type(thing),), vars(thing), []  # type: ignore[attr-defined]
        if isinstance(state, dict):
            state = {name: _without_dropped_hooks(name, value) for name, value in state.items()}
        return (make, arguments, state, *rest[:3])


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Any, begin: int) -> None:
        super().__init__(file)
        self._memory = memory
        self._begin = begin
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, name: tuple[int, TensorLocation]) -> Tensor:
        index, location = name
        if index not in self._tensors:
            self._tensors[index] = self._load(location)
        return self._tensors[index]

    def _load(self, location: TensorLocation) -> Tensor:
        if location.begin is None or not math.prod(location.shape):
            found = torch.zeros(location.shape, dtype=location.dtype)
        else:
            found = _window(self._memory, self._begin, location).clone()
        tensor = found.permute(tuple(location.order.index(dim) for dim in range(len(location.order))))
        return nn.Parameter(tensor, requires_grad=False) if location.is_parameter else tensor


def _without_dropped_hooks(name: str, value: Any) -> Any:
    if name in DROPPED_HOOKS:
        return OrderedDict()
    if name != "_forward_pre_hooks":
        return value
    # Ours are no part of the model; a reference made before the freeze has none either.
    return OrderedDict((key, hook) for key, hook in value.items() if not is_ours(hook))


def _window(memory: Any, begin: int, location: TensorLocation) -> Tensor:
    assert location.begin is not None
    count, offset = math.prod(location.shape), begin + location.begin
    return torch.frombuffer(memory, dtype=location.dtype, count=count, offset=offset).view(location.shape)


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the outermost in memory to the innermost, so that channels_last stays what it is."""
    strides: tuple[int, ...] = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def _aligned(size_bytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-size_bytes // alignment) * alignment
