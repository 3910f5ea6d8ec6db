"""The form of a call: what its arguments are, whatever numbers are in them.

An `if` on an optional argument leaves nothing behind in a traced module, which would go on computing
what it computed when traced. So it refuses calls of any other form.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def form_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return a word for each argument, defaults included.

    Raises:
        TypeError: the call does not fit the signature.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return [_describe(value) for value in bound.arguments.values()]


def accept_only(module: nn.Module, form: list[str]) -> None:
    """Let calls of another form raise a ValueError."""
    module.register_forward_pre_hook(_Guard(inspect.signature(module.forward), form), with_kwargs=True)


class _Guard:
    """A pre-hook; a class, so that a copy of the module can be made."""

    def __init__(self, signature: inspect.Signature, form: list[str]) -> None:
        self._signature, self._form = signature, form

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        form = form_of(self._signature, args, kwargs)
        if form != self._form:
            raise ValueError(f"traced with the arguments {self._form}, called with {form}")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return "Tensor"
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, numbers.Number):  # a 1 may be a 1.0 the next time
        return "number"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_describe(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_describe, value)) + "]"
    return type(value).__name__
