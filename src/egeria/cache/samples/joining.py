"""Batches of one sample each, put together to the batch that the data set would have made of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

SAMPLES, COLLATED, NOT_JOINABLE = "samples", "collated", "not joinable"


def kind_of_batches(of_one: Any, of_two: Any) -> str:
    """Tell from a batch of one sample and one of that sample twice how batches are made up."""
    if isinstance(of_one, list) and len(of_one) == 1 and isinstance(of_two, list) and len(of_two) == 2:
        return SAMPLES
    try:
        alike = _outline(joined([of_one, of_one], COLLATED)) == _outline(of_two)
    except Exception:
        return NOT_JOINABLE
    return COLLATED if alike else NOT_JOINABLE


def joined(batches: list[Any], kind: str) -> Any:
    """Return one batch from batches of one sample each.

    Raises:
        ValueError: they hold something that has no axis of one sample.
        RuntimeError: tensors of different sizes.
    """
    if kind == SAMPLES:
        if any(len(batch) != 1 for batch in batches):
            raise ValueError("a batch of one holds several")
        return [batch[0] for batch in batches]
    return _concatenated(batches)


def same(first: Any, second: Any) -> bool:
    """Tell whether two samples hold equal arrays, bit for bit; what is neither array nor container counts as equal."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return _same_tensors(first, second)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, np.ndarray) and first.dtype.hasobject:
        return True
    if hasattr(first, "tobytes") and hasattr(second, "tobytes"):  # arrays, and images of Pillow
        return bool(first.tobytes() == second.tobytes())
    return True


def _same_tensors(first: Tensor, second: Tensor) -> bool:
    if first.layout is not torch.strided or first.is_quantized:
        return True
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    as_bytes = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(as_bytes[0], as_bytes[1])


def _concatenated(trees: list[Any]) -> Any:
    first = trees[0]
    if isinstance(first, (Tensor, np.ndarray)):
        if any(tensor.ndim == 0 or tensor.shape[0] != 1 for tensor in trees):
            raise ValueError("no axis of one sample")
        return torch.cat(cast(Any, trees)) if isinstance(first, Tensor) else np.concatenate(trees)
    if isinstance(first, Mapping):
        items = {key: _concatenated([tree[key] for tree in trees]) for key in first}
        return items if type(first) is dict else type(first)(items)  # type: ignore[call-arg]
    if isinstance(first, (tuple, list)):
        members = [_concatenated(list(group)) for group in zip(*trees, strict=True)]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    raise ValueError(f"{type(first).__name__} has no axis of one sample")


def _outline(tree: Any) -> Any:
    """Return the shape of a batch: types of the containers, shapes and types of the arrays."""
    if isinstance(tree, (Tensor, np.ndarray)):
        return type(tree), tuple(tree.shape), tree.dtype
    if isinstance(tree, Mapping):
        return type(tree), {key: _outline(value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree), [_outline(value) for value in tree]
    return type(tree)
