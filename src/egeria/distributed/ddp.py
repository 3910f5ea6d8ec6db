"""DistributedDataParallel: its reducer is made for the parameters that required gradients when the
model was wrapped, and is made anew at each change of what is frozen.

Without that, a freeze raises in the second forward pass ("Expected to have finished reduction"),
and parameters that thaw diverge between ranks without an error.
"""

from __future__ import annotations

from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from egeria.distributed.ranks import LostError, world_size

_DDP = "Build DistributedDataParallel without it, or give attach the bare model"
BARE = (
    "the model is trained by several processes and called without DistributedDataParallel, so "
    "that nothing averages their gradients. Wrap the whole model: "
    "model = DistributedDataParallel(model), before attach or after it"
)
JOINED = (
    "the loop trains in `join()`, for ranks with unequally many batches: one without batches "
    "takes no part in decisions. Give all ranks equally many, as DistributedSampler does"
)
REPLICATED = (
    "DataParallel copies the model in every forward pass, and the copies cannot be watched. Use "
    "DistributedDataParallel, with one process for each device"
)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile and DistributedDataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def find_wrapper(model: nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper: `model` itself, or the one around it whose forward pass is under way.

    A framework may wrap a bare model after `attach`. The wrapper is then found by a pre-forward
    hook on the model that calls this function.
    """
    given = getattr(model, "_orig_mod", model)
    if isinstance(given, DistributedDataParallel):
        return given
    find: Any = DistributedDataParallel._get_active_ddp_module
    active, inner = find(), unwrap(model)
    return active if active and any(part is inner for part in active.modules()) else None


def refuse(wrapper: DistributedDataParallel | None) -> str | None:
    """Return why what is frozen cannot change under a wrapper; None if it can.

    Args:
        wrapper: None where the first forward pass was in no wrapper. Sharded models have none and
            are not asked for here.
    """
    if wrapper is None:
        return BARE if world_size() > 1 else None
    held: Any = wrapper
    hooks = [getattr(hook, "__qualname__", "") for hook, _ in held._comm_hooks]
    refused = {
        "DistributedDataParallel(static_graph=True) fixes at its first iteration which parameters "
        "are reduced. Build it without static_graph; find_unused_parameters is fine": (
            held.static_graph
        ),
        "DistributedDataParallel(mixed_precision=...) keeps a second copy of what it reduces. "
        f"{_DDP}; autocast does the same": held.mixed_precision is not None,
        "DistributedDataParallel(delay_all_reduce_named_params=...) reduces views that are made "
        f"once. {_DDP}": held._delay_all_reduce_params,
        "compiled autograd (optimize_ddp='python_reducer') reduces by hooks that are made once. "
        "Leave it out": held._use_python_reducer,
        "the optimizer steps within the backward pass, in a communication hook. Call "
        "optimizer.step() in the loop": any("hook_then_optimizer" in name for name in hooks),
        "a built-in communication hook cannot be registered again. Register its twin of "
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks by register_comm_hook": (
            not hooks and held._get_ddp_logging_data().get("comm_hook")
        ),
        "DistributedDataParallel is built over some processes of the job only. Build it over all": (
            distributed.get_world_size(held.process_group) != world_size()
        ),
        JOINED: held._join_config.enable,
    }
    return next((reason for reason, applies in refused.items() if applies), None)


def check_not_joined(wrapper: DistributedDataParallel | None) -> None:
    """Check before an exchange that all ranks take part in it.

    Raises:
        LostError: the loop is in `join()`. Ranks without batches repeat the reductions as they
            were, so that what is frozen must not change either.
    """
    if wrapper is not None and wrapper._join_config.enable:
        raise LostError(JOINED)


def rebuild_buckets(wrapper: DistributedDataParallel) -> None:
    """Reduce from now on what requires a gradient now. All ranks call it at the same time.

    It does what unpickling a wrapper does, for any process group and without exchanges. Options
    and communication hooks stay. It is called between a backward and a forward pass, or at the
    beginning of the model's forward pass within the wrapper's, where a resumed run finds the
    wrapper. An interrupted call leaves a reducer, and can be made again.
    """
    held: Any = wrapper
    torch_distributed: Any = distributed
    parameters, expects_sparse = held._build_params_for_reducer()
    names = held._build_debug_param_to_name_mapping(parameters)
    held._has_rebuilt_buckets = False
    held._ddp_init_helper(parameters, expects_sparse, names, held.static_graph)
    for hook, state in held._comm_hooks:  # the list stays whole, also if we are interrupted
        _forget_buckets(state)
        held.logger._set_comm_hook_name(hook.__qualname__)
        torch_distributed._register_comm_hook(held.reducer, state, hook)


def _forget_buckets(state: Any) -> None:
    """Start PowerSGD again: it keeps errors and factors by bucket.

    It compresses nothing in the first two iterations, since buckets are ordered after the first.
    """
    if hasattr(state, "start_powerSGD_iter"):
        for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
            getattr(state, name).clear()
        state.start_powerSGD_iter = max(state.start_powerSGD_iter, state.iter + 2)
