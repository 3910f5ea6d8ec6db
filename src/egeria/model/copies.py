"""Copies of a model in training for the reference model: without what this library keeps on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from egeria import tree

INSTANCE = ("forward", "train")
"""Attributes of an instance that may be ours."""


def copies_of_computed(model: nn.Module) -> dict[int, Any]:
    """Return what `copy.deepcopy` of a model needs as its memo: the tensors that modules hold from
    a forward pass.

    Old-style weight_norm keeps one, for example; such tensors only copy once detached.
    """
    computed = (
        tensor
        for module in model.modules()
        for tensor in tree.leaves(vars(module))
        if not tensor.is_leaf
    )
    return {id(tensor): tensor.detach().clone() for tensor in computed}


def is_ours(hook: Any) -> bool:
    """Return whether a hook is a function of this library, or one with arguments given in advance
    (`partial`).
    """
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("egeria.")


def without_ours(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module, or of a parameter, without hooks and functions of ours
    among them.
    """
    tables = {
        name: table
        for name, table in attributes.items()
        if name.endswith("_hooks") and isinstance(table, dict)
    }
    ours = {key for table in tables.values() for key, hook in table.items() if is_ours(hook)}
    kept: dict[str, Any] = {}
    for name, value in attributes.items():
        if name in INSTANCE and is_ours(value):
            if getattr(value, "own_forward", None) is not None:
                kept[name] = value.own_forward
        elif isinstance(value, dict) and "_hooks" in name and not ours.isdisjoint(value):
            kept[name] = type(value)(
                (key, entry) for key, entry in value.items() if key not in ours
            )
        else:
            kept[name] = value
    return kept


def without_wrappers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module without the mixed precision that Accelerate puts around its
    `forward`.

    That refuses to be pickled, and would override the number format of a reference model.
    """
    original = attributes.get("_original_forward")
    if original is None or "forward" not in attributes:
        return dict(attributes)
    kept = {
        name: value
        for name, value in attributes.items()
        if name not in ("forward", "_original_forward")
    }
    owner = getattr(original, "__self__", None)
    is_of_class = getattr(original, "__func__", None) is getattr(type(owner), "forward", ...)
    return kept if is_of_class else kept | {"forward": original}


def remove_ours(model: nn.Module, *, keeps: frozenset[nn.Module] = frozenset()) -> None:
    """Take what is ours off the modules of a copy, in place; but for those that it shares with the
    original.
    """
    for module in model.modules():
        if module not in keeps:
            _set(vars(module), without_ours(vars(module)))


def take_off_wrappers(model: nn.Module) -> None:
    """Take off the modules of a copy, in place, what `without_wrappers` leaves out."""
    for module in model.modules():
        _set(vars(module), without_wrappers(vars(module)))


def _set(table: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in table.keys() - wanted.keys():
        del table[name]
    table.update(wanted)
