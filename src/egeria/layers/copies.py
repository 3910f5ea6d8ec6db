"""Copies and pickles of a model in training, as if it had never been touched: no hook, no frozen flag, no stand-in."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_NAMES = ("__deepcopy__", "__reduce_ex__")
"""What `copy.deepcopy` and `pickle` look for, on the very object first."""


def is_ours(entry: Any) -> bool:
    """Return whether a hook or an attribute is of this library, or a function of it with arguments given in advance."""
    return str(getattr(getattr(entry, "func", entry), "__module__", "")).startswith("egeria.")


def without_ours(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module without our hooks, and without what we put in place of its methods."""
    found = {
        name: value for name, value in attributes.items() if name not in (*_NAMES, "forward") or not is_ours(value)
    }
    forward = attributes.get("forward")
    if is_ours(forward) and getattr(forward, "own", None) is not None:
        found["forward"] = forward.own  # type: ignore[union-attr]
    tables = [name for name in found if name.startswith(("_forward_pre_hooks", "_forward_hooks"))]
    ours = {key for name in tables for key, hook in found[name].items() if is_ours(hook)}
    if ours:  # the hooks, and what was said about them when they were registered
        for name in tables:
            found[name] = type(found[name])((key, hook) for key, hook in found[name].items() if key not in ours)
    return found


def remove_ours(model: nn.Module) -> None:
    """Take what is ours off a copy of a model: there it serves nobody, and a layer with a hook is no plain layer."""
    for module in model.modules():
        _set(vars(module), without_ours(vars(module)))


class KeptOutOfCopies:
    """Keeps what is ours out of copies of some modules and parameters, until it is closed.

    `copy.deepcopy` (and so averages of weights), `pickle` and `torch.save` give modules without our hooks and in the
    mode that they would have, and parameters that need a gradient. What the user has frozen or hooked is copied as it
    is. Entries may be kept by several of these.

    Args:
        entries: modules, and parameters that are frozen for now.
        mode_of: the model whose mode the modules have but for us; None if they have their own.
    """

    def __init__(self, entries: Iterable[nn.Module | nn.Parameter], mode_of: nn.Module | None = None) -> None:
        self._modes = mode_of is not None
        self._copiers: list[_Copier] = []
        for entry in entries:
            copier = vars(entry).get(_NAMES[0])
            if not isinstance(copier, _Copier):
                copier = _Copier(entry)
            copier.users += 1
            if mode_of is not None:
                copier.mode_of = weakref.ref(mode_of)
            self._copiers.append(copier)

    def close(self) -> None:
        """Let entries be copied as they are; more than once is no error."""
        copiers, self._copiers = self._copiers, []
        for copier in copiers:
            copier.users -= 1
            if self._modes:
                copier.mode_of = None
            if copier.users == 0:
                copier.remove()


class _Copier:
    """Copies and pickles one module or parameter, in place of its own methods."""

    def __init__(self, entry: Any) -> None:
        self._entry = weakref.ref(entry)
        self.users = 0
        self.mode_of: weakref.ref[nn.Module] | None = None
        vars(entry).update({"__deepcopy__": self, "__reduce_ex__": self.reduce})

    def remove(self) -> None:
        entry = self._entry()
        for name in _NAMES:
            vars(entry).pop(name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copier:
        return self

    def __call__(self, memo: dict[int, Any]) -> Any:
        """Stand for `__deepcopy__` of the entry."""
        entry: Any = self._entry()
        own: Callable[..., Any] | None = getattr(type(entry), "__deepcopy__", None)
        if own is not None:
            copied = own(entry, memo)
            if isinstance(entry, torch.Tensor):
                return copied.requires_grad_()
            _set(vars(copied), self._as_found(vars(copied)))
            return copied
        reduced: Any = type(entry).__reduce_ex__
        make, arguments, state = (*reduced(entry, 4), None)[:3]
        copied = memo[id(entry)] = make(*copy.deepcopy(arguments, memo))
        state = copy.deepcopy(self._as_found(state), memo)
        copied.__setstate__(state) if hasattr(copied, "__setstate__") else vars(copied).update(state)
        return copied

    def reduce(self, protocol: int) -> Any:
        """Stand for `__reduce_ex__` of the entry."""
        entry: Any = self._entry()
        own: Any = type(entry).__reduce_ex__
        if not isinstance(entry, torch.Tensor):
            make, arguments, *rest = own(entry, protocol)
            return (make, arguments, *(self._as_found(state) for state in rest[:1]), *rest[1:])
        kept = {name: vars(entry).pop(name) for name in _NAMES}
        try:
            make, (data, _, *rest) = own(entry, protocol)
        finally:
            vars(entry).update(kept)
        return make, (data, True, *rest)

    def _as_found(self, state: Any) -> Any:
        """Return the state of a module as it would be without us."""
        if not isinstance(state, dict):  # of a class that makes its own
            return state
        found, model = without_ours(state), self.mode_of() if self.mode_of else None
        return found if model is None or "training" not in found else {**found, "training": model.training}


def _set(attributes: dict[str, Any], found: dict[str, Any]) -> None:
    for name in attributes.keys() - found.keys():
        del attributes[name]
    attributes.update(found)
