"""What torch puts around a model: `torch.compile`, and `fully_shard`, which leaves each process
parts of parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.layers.batch import Batch
from egeria.layers.copies import deepcopy_as_is, without_ours

_Function = TypeVar("_Function", bound=Any)


def without_wrapper(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` was given; any other module as it is."""
    is_wrapped = any(kind.__name__ == "OptimizedModule" for kind in type(model).__mro__)
    return model._orig_mod if is_wrapped else model  # type: ignore[return-value]


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it was compiled in place (`model.compile()`)."""
    return any(module._compiled_call_impl is not None for module in model.modules())


compiling_callback: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None
)
"""Returns what compiles the functions called now; None or False where nothing does. Not to be
called by a function of its own, which would be compiled first."""


def run_uncompiled(function: _Function) -> _Function:
    """Have torch run a function as it is where its callers are compiled, and go on compiling what
    it calls.

    Costs nothing per call, and is no graph break: for hooks that run ahead of a compiled forward
    pass.
    """
    eval_frame: Any = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        eval_frame.set_code_exec_strategy(
            function.__code__, eval_frame._FrameExecStrategy(skip, default)
        )
    elif hasattr(eval_frame, "skip_code"):
        eval_frame.skip_code(function.__code__)
    return function


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters of a model are in parts, so that no process
    can run it alone.
    """
    in_parts = any(_is_part(parameter) for parameter in model.parameters())
    return in_parts or any(
        _is_of_shards(type(module)) for module in model.modules()
    )  # whole for the moment


def own_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor; all of it where it is not in parts."""
    part: Tensor = tensor.to_local() if _is_part(tensor) else tensor  # type: ignore[attr-defined]
    return part


def reshard(model: nn.Module) -> None:
    """Put the parts back in place of whole parameters that a forward pass has left behind."""
    for module in model.modules():
        if _is_of_shards(type(module)):
            module.reshard()  # type: ignore[operator]


def choose_dtypes_again(module: nn.Module) -> None:
    """Let a unit that was all frozen at its first forward pass find the number formats that its
    gradients come in.

    `fully_shard` looks for them once, among what trains then.
    """
    state = module._get_fsdp_state() if _is_of_shards(type(module)) else None  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    for group in groups:
        if getattr(group, "_orig_dtype", ...) is None:
            group._init_mp_dtypes()


def without_torch(table: dict[int, Any]) -> dict[int, Any]:
    """Return a table of hooks without those of `torch.distributed`."""

    def is_of_torch(hook: Any) -> bool:
        return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(
            "torch.distributed"
        )

    return type(table)((key, hook) for key, hook in table.items() if not is_of_torch(hook))


def _is_part(tensor: Tensor) -> bool:
    """Return whether this process holds a part of a tensor only."""
    return hasattr(tensor, "full_tensor")


def _is_of_shards(kind: type) -> bool:
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


def outline(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    """Return a model and a batch for a forward pass of which only shapes and gradient functions
    matter.

    Both as they are, but for a model in parts: a copy on the meta device then, which has no weights
    and takes no time.
    """
    return (_copy_on_meta(model), batch.on("meta")) if is_sharded(model) else (model, batch)


def _copy_on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model in parts as one that is whole, with empty tensors."""
    memo: dict[int, Any] = {
        id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for module in model.modules()
        for tensor in tree.leaves(vars(module))
    }
    for entry in model.parameters():
        memo[id(entry)] = nn.Parameter(memo[id(entry)], requires_grad=entry.requires_grad)
    shells = []
    for module in model.modules():
        attributes = _attributes(module)
        plain: type[nn.Module] = next(
            kind for kind in type(module).__mro__ if not _is_of_shards(kind)
        )
        if plain is not type(module) or attributes != vars(module):  # `fully_shard` has changed it
            # `object`, since torch.fx has a `__new__` that makes another class, without `forward`.
            memo[id(module)] = object.__new__(plain)
            shells.append((memo[id(module)], attributes))
    for shell, attributes in shells:
        shell.__dict__.update(deepcopy_as_is(attributes, memo))
    return copy.deepcopy(model, memo)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module without what `fully_shard` keeps there."""
    own = {
        name: value
        for name, value in without_ours(vars(module)).items()
        if not name.startswith("__composable_api")
    }
    return {
        n: without_torch(v) if n.endswith("_hooks") and isinstance(v, dict) else v
        for n, v in own.items()
    }
