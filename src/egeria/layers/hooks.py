"""Telling our own hooks from the user's."""

from __future__ import annotations

from typing import Any

from torch import nn

_TABLES = ("_forward_pre_hooks", "_forward_hooks")
_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def is_ours(hook: Any) -> bool:
    """Tell whether a hook is a function of this library, or one with arguments given in advance (`partial`)."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("egeria.")


def remove_ours(model: nn.Module) -> None:
    """Take our hooks off a copy of a model: there they serve nobody, and a layer with a hook is no plain layer."""
    for module in model.modules():
        tables = vars(module)
        ours = [key for table in _TABLES for key, hook in tables.get(table, {}).items() if is_ours(hook)]
        for table in (*_TABLES, *_FLAGS):
            for key in ours:
                tables.get(table, {}).pop(key, None)
