"""Packing models, batches and activations into shared memory.

A parcel is a pickle in which tensors are replaced by their place behind it: they are copied once,
from whatever device they are on. Classes of the user's script or notebook travel by value
(cloudpickle), so the other process never runs the script again.
"""

from __future__ import annotations

import copyreg
import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor, nn

from egeria.controller.memory import Segment
from egeria.layers.hooks import is_ours

ALIGNMENT = 64
HEADER_BYTES = 8
HOOKS = (
    "_forward_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


class Place(NamedTuple):
    """Where a tensor lies, and what it is."""

    begin: int | None
    """Bytes behind the pickle; None for one that comes without its values."""
    shape: tuple[int, ...]
    """In the order of memory."""
    order: tuple[int, ...]
    """The dimensions from the outermost in memory to the innermost."""
    dtype: torch.dtype
    is_parameter: bool


def pack(thing: Any, segment: Segment, *, hollow: Collection[Tensor] = ()) -> int:
    """Put anything into the segment and return how many bytes it takes there.

    Of modules the hooks stay behind that only watch or save; pre-hooks go along, some compute weights,
    but for those of a frozen layer.

    Args:
        thing: what to pack.
        segment: where to.
        hollow: tensors of it that arrive without their values.

    Raises:
        Exception: whatever its pickling raises.
        OSError: there is no memory left.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, {id(tensor) for tensor in hollow})
    pickler.dump(thing)
    pickled = file.getbuffer()
    begin = _aligned(HEADER_BYTES + len(pickled))
    memory = segment.reserve(begin + pickler.size_bytes)
    memory[:HEADER_BYTES] = len(pickled).to_bytes(HEADER_BYTES, "little")
    memory[HEADER_BYTES : HEADER_BYTES + len(pickled)] = pickled
    with torch.no_grad():
        for tensor, place in zip(pickler.tensors, pickler.places, strict=True):
            if tensor.numel() and place.begin is not None:
                _window(memory, begin, place).copy_(tensor.permute(place.order))
    return begin + pickler.size_bytes


def unpack(segment: Segment, size_bytes: int) -> Any:
    """Return what was packed; its tensors are copies of their own, on the CPU, without gradient."""
    memory = segment.map(size_bytes)
    length = int.from_bytes(memory[:HEADER_BYTES], "little")
    pickled = memory[HEADER_BYTES : HEADER_BYTES + length]
    return _Unpickler(io.BytesIO(pickled), memory, _aligned(HEADER_BYTES + length)).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves plain tensors out and notes where they go; one that appears twice goes once."""

    def __init__(self, file: io.BytesIO, hollow: set[int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._hollow = hollow
        self.tensors: list[Tensor] = []
        self.places: list[Place] = []
        self.size_bytes = 0
        self._known: dict[int, tuple[int, Tensor]] = {}  # the tensor too: an id is unique only among the living

    def persistent_id(self, thing: Any) -> tuple[int, Place] | None:
        if type(thing) not in PLAIN_TENSORS or thing.layout is not torch.strided or thing.is_quantized or thing.is_meta:
            return None
        if id(thing) not in self._known:
            self._known[id(thing)] = len(self.tensors), thing
            order = _memory_order(thing)
            shape = tuple(thing.shape[dim] for dim in order)
            begin = None if id(thing) in self._hollow else self.size_bytes
            self.places.append(Place(begin, shape, order, thing.dtype, isinstance(thing, nn.Parameter)))
            self.tensors.append(thing.detach())
            if begin is not None:
                self.size_bytes += _aligned(thing.numel() * thing.element_size())
        index, _ = self._known[id(thing)]
        return index, self.places[index]

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, nn.Module):
            return super().reducer_override(thing)
        try:
            make, arguments, state, *rest = (*thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL), None)[:6]
        except RuntimeError:  # parametrized modules refuse, for the sake of files that outlive their classes
            make, arguments, state, rest = copyreg.__newobj__, (type(thing),), vars(thing), []  # type: ignore[attr-defined]
        if isinstance(state, dict):
            state = {name: _hooks_that_go_along(name, value) for name, value in state.items()}
        return (make, arguments, state, *rest[:3])


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Any, begin: int) -> None:
        super().__init__(file)
        self._memory = memory
        self._begin = begin
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, name: tuple[int, Place]) -> Tensor:
        index, place = name
        if index not in self._tensors:
            self._tensors[index] = self._load(place)
        return self._tensors[index]

    def _load(self, place: Place) -> Tensor:
        if place.begin is None or not math.prod(place.shape):
            found = torch.zeros(place.shape, dtype=place.dtype)
        else:
            found = _window(self._memory, self._begin, place).clone()
        tensor = found.permute(tuple(place.order.index(dim) for dim in range(len(place.order))))
        return nn.Parameter(tensor, requires_grad=False) if place.is_parameter else tensor


def _hooks_that_go_along(name: str, value: Any) -> Any:
    if name in HOOKS:
        return OrderedDict()
    if name != "_forward_pre_hooks":
        return value
    # Ours are no part of the model; a reference made before the freeze has none either.
    return OrderedDict((key, hook) for key, hook in value.items() if not is_ours(hook))


def _window(memory: Any, begin: int, place: Place) -> Tensor:
    assert place.begin is not None
    count, offset = math.prod(place.shape), begin + place.begin
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=offset).view(place.shape)


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the outermost in memory to the innermost, so that channels_last stays what it is."""
    strides: tuple[int, ...] = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
