"""Nested tensors: what `forward` takes and returns.

A *tree* is a tensor, a container of trees, or any other value, which stays as it is.
"""

import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tree = Any

_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, np.generic, *_OF_TORCH)
_CONTAINERS = (Mapping, tuple, list, deque)
_DEEPEST = 12


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Yield every tensor of the tree, depth first, in the order of the containers."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (Mapping, tuple, list)):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(value)


def contents(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values of a tree and of the objects in it, each after its path.

    It looks into objects of any class, such as the key-value caches of `transformers`, but not into
    modules, classes and functions.
    """
    return (e for e in _walk(value, name) if isinstance(e[1], Tensor) or is_plain(e[1]))


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a tree and of the objects in it."""
    return [entry for _, entry in contents(value) if isinstance(entry, Tensor)]


def unreadable(value: Any, name: str = "") -> str:
    """Return the path and the type of the first thing that `contents` leaves out; '' for none.

    Such as an array of numpy, a set, a generator; or of a tensor that is not plain memory.
    """
    for path, entry in _walk(value, name):
        is_readable = is_plain(entry)
        if isinstance(entry, Tensor):
            is_special = entry.is_quantized or entry.is_meta or entry.is_nested
            is_readable = entry.layout is torch.strided and not is_special
        if not is_readable:
            return f"{path} ({type(entry).__qualname__})"
    return ""


def _walk(value: Any, name: str, inside: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield tensors, plain values, and whatever has something in it that cannot be seen."""
    if is_plain(value) or isinstance(value, Tensor):
        yield name, value
    elif id(value) not in inside and not callable(value) and not isinstance(value, ModuleType):
        is_container, is_too_deep = isinstance(value, _CONTAINERS), len(inside) > _DEEPEST
        entries = [] if is_too_deep else _entries(value)
        if is_too_deep or not (is_container or (entries and not isinstance(value, Collection))):
            yield name, value
        for key, entry in entries:
            yield from _walk(entry, f"{name}.{key}", inside | {id(value)})


def _entries(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, _CONTAINERS):
        return list(enumerate(value))
    slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
    in_slots = [(slot, getattr(value, slot)) for slot in slots if hasattr(value, slot)]
    return [*getattr(value, "__dict__", {}).items(), *in_slots]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Return the tree with `function` applied to each tensor; containers keep their type."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        items = {key: map_tensors(function, value) for key, value in tree.items()}
        try:
            return type(tree)(items)  # type: ignore[call-arg]
        except TypeError:  # its constructor takes something else
            return items
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value) for value in tree)
    return tree


def requires_grad(tree: Tree) -> bool:
    """Return whether any tensor of the tree takes part in the autograd graph."""
    return any(tensor.requires_grad for tensor in leaves(tree))


def first_activation(tree: Tree) -> Tensor | None:
    """Return the first floating-point tensor of two dimensions or more, or None."""
    found = (tensor for tensor in leaves(tree) if tensor.is_floating_point() and tensor.dim() > 1)
    return next(found, None)


def take_rows(tree: Tree, count: int) -> Tree:
    """Return the first `count` rows of every tensor, or the tree where their numbers differ.

    They do where the batch shares a mask: a wrong cut would change what the model computes.
    """
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in leaves(tree)}
    is_cut = len(sizes) == 1 and max(sizes) > count
    return map_tensors(lambda tensor: tensor[:count], tree) if is_cut else tree


def sum_bytes(tensor: Tensor) -> int:
    """Return the sum of a tensor's bytes, eight at a time where they can be, without a copy."""
    held = own_part(tensor).detach().flatten().view(torch.uint8)
    is_even = held.numel() % 8 == 0 and held.storage_offset() % 8 == 0
    return int((held.view(torch.int64) if is_even else held).sum())


def checksum(tree: Tree, total: int = 0) -> int:
    """Return a number that tells trees apart, whatever the order of their keys.

    Of values that are not plain only the type counts.
    """
    if isinstance(tree, Tensor) and tree.layout is torch.strided:
        total = checksum((tree.dtype, *tree.shape), total)
        held = own_part(tree).cpu().contiguous().flatten().view(torch.uint8)
        return zlib.crc32(held.numpy().data, total)
    if isinstance(tree, Mapping):
        tree = [(key, tree[key]) for key in sorted(tree, key=repr)]
    if isinstance(tree, (list, tuple)):
        total = zlib.crc32(b"%d entries" % len(tree), total)
        for entry in tree:
            total = checksum(entry, total)
        return total
    what = repr(tree) if is_plain(tree) else type(tree).__qualname__
    return zlib.crc32(what.encode(errors="backslashreplace"), total)


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string or the like: compared by value."""
    if isinstance(value, slice):
        return all(map(is_plain, (value.start, value.stop, value.step)))
    return isinstance(value, _PLAIN)


def own_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, detached: a part of it where it is sharded."""
    held = tensor.detach()
    return held.to_local() if hasattr(held, "to_local") else held
