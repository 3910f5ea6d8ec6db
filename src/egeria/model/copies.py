"""Copies of a model in training: what belongs to the loop, or to this library, stays behind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from egeria import tree

# Forward pre-hooks are kept: some compute weights.
_WATCHING = {name for name in vars(nn.Module()) if name.endswith("_hooks")} - {"_forward_pre_hooks"}


def copies_of_computed(model: nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` of a model, with the tensors that its modules computed.

    Old-style weight_norm keeps one, for example; such tensors only copy once detached.
    """
    tensors = (tensor for module in model.modules() for tensor in tree.leaves(vars(module)))
    return {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}


def is_ours(hook: Any) -> bool:
    """Return whether a hook is a function of this library, or a `partial` of one."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("egeria.")


def without_watchers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module without hooks that watch it, and without mixed precision.

    That is the `forward` which Accelerate puts in place of the model's own: it refuses to be
    pickled, and would override the number format of a reference model.
    """
    kept = {name: OrderedDict() if name in _WATCHING else attributes[name] for name in attributes}
    original = kept.get("_original_forward")
    if original is not None and "forward" in kept:
        del kept["forward"], kept["_original_forward"]
        owner = getattr(original, "__self__", None)
        if getattr(original, "__func__", None) is not getattr(type(owner), "forward", ...):
            kept["forward"] = original
    return kept
