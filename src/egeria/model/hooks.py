"""Hooks that their owner can find and copies do not run, and what else copies leave out."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn

from egeria import tree

_TABLES = ("_forward_hooks", "_forward_pre_hooks")
_FLAGS = ("_with_kwargs", "_always_called")
# Copies keep forward pre-hooks: some compute weights.
_WATCHING = {name for name in vars(nn.Module()) if name.endswith("_hooks")} - {"_forward_pre_hooks"}


class Hook(partial[Any]):
    """Calls a function with its owner as first argument, who can remove it by `sweep`.

    In copies and pickles of the model a function of the standard library, which does nothing, takes
    its place, so that a saved model can be loaded without this library.
    """

    def __new__(cls, owner: Any, function: Callable[..., Any]) -> "Hook":  # noqa: D102
        return super().__new__(cls, function, owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def is_ours(hook: Any) -> bool:
    """Return whether a hook is a function of this library, or a `partial` of one."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("egeria.")


def sweep(model: nn.Module, owner: Any) -> None:
    """Remove all hooks of an owner, also half registered or half removed ones."""
    for module in model.modules():
        for name in _TABLES:
            table = getattr(module, name)
            remove(table, owner)
            for flags in (getattr(module, f"{name}{flag}", {}) for flag in _FLAGS):
                for key in flags.keys() - table.keys():
                    del flags[key]


def remove(table: dict[int, Any], owner: Any) -> None:
    """Remove the hooks of an owner from a table."""
    for key, hook in list(table.items()):
        if isinstance(hook, Hook) and hook.args[0] is owner:
            table.pop(key, None)


def copies_of_computed(model: nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy`, with copies of computed tensors, which it cannot make."""
    tensors = (tensor for module in model.modules() for tensor in tree.leaves(vars(module)))
    return {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}


def without_watchers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's attributes without hooks that watch, and without Accelerate's `forward`."""
    kept = {name: OrderedDict() if name in _WATCHING else attributes[name] for name in attributes}
    original = kept.get("_original_forward")
    if original is not None and "forward" in kept:
        del kept["forward"], kept["_original_forward"]
        owner = getattr(original, "__self__", None)
        if getattr(original, "__func__", None) is not getattr(type(owner), "forward", ...):
            kept["forward"] = original
    return kept
