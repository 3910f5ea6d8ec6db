"""Copies of a model in training, made by `deepcopy`, `pickle` or `torch.save`: without what this
library keeps on it.

What is ours on a module: hooks that are functions or methods of this library, and instance
attributes named in `INSTANCE` whose value is one. A function of ours that stands in for a `forward`
of the user's on the instance names that as its `own_forward`. Whoever puts such a thing on a module
for longer than a forward pass keeps the module's copies free of it by `PlainCopies`; parameters
that were frozen by us are given to it too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from egeria import tree

COPYING = ("__reduce_ex__", "__deepcopy__")
"""How Python asks an object for a copy. It asks the instance first."""
INSTANCE = ("forward", *COPYING)
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


def _ours(attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the hooks and functions of ours among the attributes of a module."""
    yield from (value for name, value in attributes.items() if name in INSTANCE and is_ours(value))
    tables = (
        table
        for name, table in attributes.items()
        if name.endswith("_hooks") and isinstance(table, dict)
    )
    yield from (hook for table in tables for hook in table.values() if is_ours(hook))


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


class PlainCopies:
    """Keeps what is ours out of copies of one module or parameter, until it is removed.

    Copies are as the user's own training would have made them, whichever object holds what is
    copied; files hold no reference to this library. Several may be in force for one thing.

    Args:
        thing: a module; or a parameter that was frozen by us, which needs a gradient in copies.
        training: gives the mode that copies of the module have; None leaves them as the module is.
    """

    def __init__(
        self, thing: nn.Module | nn.Parameter, training: Callable[[], bool] | None = None
    ) -> None:
        self._training = training
        found = getattr(vars(thing).get("__reduce_ex__"), "__self__", None)
        self._copier = found if isinstance(found, _Copier) else _Copier(thing)
        self._copier.holders.append(self)

    def remove(self) -> None:
        """Let copies be made as the thing is; removing twice is fine."""
        if self in self._copier.holders:
            self._copier.holders.remove(self)
            if not self._copier.holders:
                self._copier.close()

    def mode(self) -> bool | None:
        """Return the mode of copies, None where it is the module's own."""
        return None if self._training is None else self._training()


class _Copier:
    """Answers for one module or parameter when Python copies it."""

    def __init__(self, thing: nn.Module | nn.Parameter) -> None:
        self._thing = thing
        self.holders: list[PlainCopies] = []
        table = vars(thing)
        self._reduce, self._deepcopy = thing.__reduce_ex__, getattr(thing, "__deepcopy__", None)
        self._own = {
            name: table.pop(name) for name in COPYING if name in table
        }  # what the user has put there
        table["__reduce_ex__"] = self.reduce
        if self._deepcopy is not None:
            table["__deepcopy__"] = self.deepcopy

    def close(self) -> None:
        table = vars(self._thing)
        for name in COPYING:
            table.pop(name, None)
        table.update(self._own)

    def reduce(self, protocol: Any) -> Any:
        """Return how to build a copy, as `object.__reduce_ex__` does."""
        if isinstance(self._thing, nn.Module):
            made = self._reduce(protocol)
            return tuple(map(self._clean, made)) if isinstance(made, tuple) else made
        twin = nn.Parameter(self._thing.detach(), requires_grad=True)
        vars(twin).update(without_ours(vars(self._thing)) | self._own)
        return twin.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def deepcopy(self, memo: dict[int, Any]) -> Any:
        """Return a copy of something whose class copies itself."""
        assert self._deepcopy is not None
        if isinstance(
            self._thing, nn.Module
        ):  # its class may copy its attributes one by one, as that of torch.fx
            memo.update(
                (id(value), value)
                for module in self._thing.modules()
                for value in _ours(vars(module))
            )
        copied = self._deepcopy(memo)
        if isinstance(copied, nn.Module) and isinstance(self._thing, nn.Module):
            remove_ours(copied, keeps=frozenset(self._thing.modules()))
            if copied is not self._thing:
                copied.__dict__["training"] = self._mode(copied.training)
        elif isinstance(copied, torch.Tensor) and copied is not self._thing:
            _set(vars(copied), without_ours(vars(copied)))
            copied.requires_grad_(True)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copier:
        return self  # a class that copies its attributes one by one takes it along for a moment

    def _mode(self, current: bool) -> bool:
        modes = [mode for holder in self.holders if (mode := holder.mode()) is not None]
        return modes[0] if modes else current

    def _clean(self, part: Any) -> Any:
        """Return a part of what makes a module without what is ours: attributes may be its state or
        an argument.
        """
        if isinstance(part, dict) and "_forward_hooks" in part:
            return (
                without_ours(part)
                | self._own
                | {"training": self._mode(part.get("training", True))}
            )
        return tuple(map(self._clean, part)) if type(part) is tuple else part


def deepcopy_as_is(attributes: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    """Return a deep copy of attributes of a module, ours included."""
    return copy.deepcopy(
        {name: value for name, value in attributes.items() if name not in COPYING}, memo
    )
