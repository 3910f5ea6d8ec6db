"""Hooks that are found by their owner, whatever was interrupted, and do nothing in copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn

_TABLES = ("_forward_hooks", "_forward_pre_hooks")
_FLAGS = ("_with_kwargs", "_always_called")


class Hook(partial[Any]):
    """Calls a function with its owner in front, who may remove the hook by `sweep`.

    A model may be copied or saved at any time (averages of weights, `torch.save(model)`). The copy
    has a function of the standard library that does nothing in its place, so that a saved model is
    loaded where this library is not installed.
    """

    def __new__(cls, owner: Any, function: Callable[..., Any]) -> Hook:  # noqa: D102
        return super().__new__(cls, function, owner)

    @property
    def owner(self) -> Any:
        """What the function is called with in front."""
        return self.args[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def sweep(model: nn.Module, owner: Any) -> None:
    """Remove all hooks of an owner, also one whose registration or removal was interrupted."""
    for module in model.modules():
        for name in _TABLES:
            table = getattr(module, name)
            for key in [k for k, hook in table.items() if getattr(hook, "owner", None) is owner]:
                table.pop(key, None)
            for flags in (getattr(module, f"{name}{flag}", {}) for flag in _FLAGS):
                for key in flags.keys() - table.keys():
                    del flags[key]
