"""What one forward pass did: all that a user could read afterwards, for comparing two passes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.layers.batch import Batch
from egeria.layers.undisturbed import random_fingerprint

TOLERANCE = 1e-4
"""Largest relative difference between two ways to compute the same, at float32 and above (issue 4)."""

_OWN = frozenset({"training", "forward", "_parameters", "_buffers", "_modules"})
"""Tables of `nn.Module` that are looked at elsewhere, and what freezing and skipping themselves set."""


def tolerance(batch: Batch, device: torch.device) -> float:
    """Return the relative difference that the precision of a forward pass allows."""
    if batch.autocast.enabled:
        return max(TOLERANCE, 8 * torch.finfo(batch.autocast.dtype).eps)
    uses_tf32 = device.type == "cuda" and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
    return 8 * 2.0**-10 if uses_tf32 else TOLERANCE


def difference(first: Tensor, second: Tensor) -> float:
    """Return the largest difference of two tensors of one shape, relative to the largest value of the second.

    Infinite where one of them is not finite and the other is something else; 0 for equal tensors.
    """
    if first.shape != second.shape:
        return math.inf
    if torch.equal(first, second):
        return 0.0
    if not second.is_floating_point() and not second.is_complex():
        return math.inf
    wide = (
        torch.complex128 if second.is_complex() else torch.float64 if second.dtype == torch.float64 else torch.float32
    )
    a, b = first.to(wide), second.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool((~same & ~(a.isfinite() & b.isfinite())).any()):
        return math.inf
    gap = torch.where(same, torch.zeros_like(a.abs()), (a - b).abs()).max().item()
    size = torch.where(b.isfinite(), b.abs(), torch.zeros_like(b.abs())).max().item()
    return float(gap / size) if size else math.inf


def is_close(first: Tensor, second: Tensor, limit: float) -> bool:
    """Tell whether two tensors are the same up to rounding, also that of their own dtype."""
    if second.is_floating_point():
        limit = max(limit, 8 * torch.finfo(second.dtype).eps)
    return first.dtype == second.dtype and difference(first, second) <= limit


class Attributes:
    """The attributes that modules have besides their tables, as they are now."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._before = {name: dict(_own(module)) for name, module in modules.items()}
        self._sizes = {name: {key: _size(value) for key, value in own.items()} for name, own in self._before.items()}

    def changed(self) -> dict[str, Any]:
        """Return those set anew or resized since, by name; what was set to an equal plain value is not among them."""
        found: dict[str, Any] = {}
        for name, module in self._modules.items():
            before, sizes = self._before[name], self._sizes[name]
            for key, value in _own(module).items():
                same = key in before and (before[key] is value or _is_equal(before[key], value))
                if not same or _size(value) != sizes[key]:
                    found[f"{name}.{key}".strip(".")] = value
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one forward pass gave and changed, by name; plain values and tensors, which are copies."""

    values: Mapping[str, Any]
    random: tuple[object, ...]

    @classmethod
    def of(cls, model: nn.Module, given: Any, arguments: Any, attributes: Mapping[str, Any]) -> Outcome:
        """Collect it right after the pass.

        Args:
            model: the model that ran.
            given: what it returned.
            arguments: what it was called with; it may have written there.
            attributes: those of its modules that changed, by name.
        """
        parts = {
            "output": given,
            "argument": arguments,
            "buffer": dict(model.named_buffers()),
            "attribute": dict(attributes),
        }
        values = {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for part, content in parts.items()
            for name, value in tree.contents(content, part)
        }
        return cls(values, random_fingerprint(model))

    def first_difference(self, other: Outcome, limit: float) -> str:
        """Return the name of the first thing that differs by more than rounding; empty if nothing does."""
        for name in [*self.values, *(name for name in other.values if name not in self.values)]:
            if name not in self.values or name not in other.values:
                return name
            if not _agree(self.values[name], other.values[name], limit):
                return name
        return "" if self.random == other.random else "the random state"

    @property
    def is_finite(self) -> bool:
        """Whether no output is NaN: beside NaN no poison shows."""
        outputs = [value for name, value in self.values.items() if name.startswith("output")]
        return not any(isinstance(value, Tensor) and bool(value.isnan().any()) for value in outputs)


def float_tensors(given: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output that need a gradient, also those inside objects."""
    tensors = [value for _, value in tree.contents(given) if isinstance(value, Tensor)]
    return [tensor for tensor in tensors if tensor.requires_grad and tensor.is_floating_point()]


def gradients_agree(first: Sequence[Tensor | None], second: Sequence[Tensor | None], limit: float) -> bool:
    """Tell whether gradients are the same up to rounding, relative to the largest of them all.

    Some are zero but for rounding, such as that of a bias in front of a normalisation.
    """
    if [gradient is None for gradient in first] != [gradient is None for gradient in second]:
        return False
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None and b.numel()]
    size = max((float(b.abs().max()) for _, b in pairs), default=0.0)
    gap = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    return all(bool(a.isfinite().all()) for a, _ in pairs) and gap <= limit * size


def _agree(first: Any, second: Any, limit: float) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return is_close(first, second, limit)
    if isinstance(first, float) and isinstance(second, float):
        return (
            first == second or math.isclose(first, second, rel_tol=limit) or (math.isnan(first) and math.isnan(second))
        )
    return type(first) is type(second) and bool(first == second)


def _own(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if key not in _OWN and "_hooks" not in key}


def _is_equal(before: Any, after: Any) -> bool:
    """Tell whether a value was set to what it was; a tensor made anew counts as another one."""
    first, second = dict(tree.contents(before)), dict(tree.contents(after))
    if type(before) is not type(after) or first.keys() != second.keys() or not first:
        return False
    return all(
        value is second[name] or (tree.is_plain(value) and value == second[name]) for name, value in first.items()
    )


def _size(value: Any) -> int | None:
    return len(value) if isinstance(value, Collection) and not isinstance(value, (str, bytes, Tensor)) else None
