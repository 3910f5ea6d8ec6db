"""DistributedDataParallel: its reducer is rebuilt whenever the frozen depth changes.

Otherwise a freeze raises in the second forward pass ("Expected to have finished reduction"), and
parameters that thaw diverge between ranks without an error.
"""

from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from egeria.distributed.ranks import LostError, world_size

_DDP = "Build DistributedDataParallel without it"
BARE = (
    "the model is called without DistributedDataParallel, so that nothing averages the gradients "
    "of the processes. Wrap it: model = DistributedDataParallel(model)"
)
JOINED = (
    "the loop trains in `join()`, where a rank without batches takes no part in decisions. Give "
    "all ranks equally many, as DistributedSampler does"
)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile and DistributedDataParallel."""
    is_wrapper = isinstance(model, DistributedDataParallel)
    inner: Any = model.module if is_wrapper else getattr(model, "_orig_mod", None)
    return model if inner is None else unwrap(inner)


def find_wrapper(model: nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper: `model` itself, or the one around it whose forward pass is under way."""
    given = getattr(model, "_orig_mod", model)
    if isinstance(given, DistributedDataParallel):
        return given
    # A framework may wrap the model after `attach`: a hook on it finds the wrapper.
    find: Any = DistributedDataParallel._get_active_ddp_module
    active, inner = find(), unwrap(model)
    return active if active and any(part is inner for part in active.modules()) else None


def refuse(wrapper: DistributedDataParallel | None) -> str | None:
    """Return why layers cannot be frozen in this wrapper, or without one; None if they can."""
    if wrapper is None:
        return BARE if world_size() > 1 else None
    held: Any = wrapper
    hooks = [getattr(hook, "__qualname__", "") for hook, _ in held._comm_hooks]
    is_partial = distributed.get_world_size(held.process_group) != world_size()
    is_built_in = not hooks and held._get_ddp_logging_data().get("comm_hook")
    is_mixed, is_delayed = held.mixed_precision is not None, held._delay_all_reduce_params
    is_stepping = any("hook_then_optimizer" in name for name in hooks)
    is_power = any(hasattr(state, "start_powerSGD_iter") for _, state in held._comm_hooks)
    refused = {
        f"static_graph=True fixes once what is reduced. {_DDP}": held.static_graph,
        f"mixed_precision reduces a second copy, as autocast does not. {_DDP}": is_mixed,
        f"delay_all_reduce_named_params reduces views that are made once. {_DDP}": is_delayed,
        f"'python_reducer' reduces by hooks that are made once. {_DDP}": held._use_python_reducer,
        "the optimizer steps within the backward pass, in a hook. Call it in the loop": is_stepping,
        "a built-in communication hook cannot be registered again. Use register_comm_hook with its "
        "twin of torch.distributed.algorithms.ddp_comm_hooks.default_hooks": is_built_in,
        "the wrapper is over some ranks of the job only. Build it over all": is_partial,
        "PowerSGD keeps errors by bucket, and buckets change. Leave it out": is_power,
        JOINED: held._join_config.enable,
    }
    return next((reason for reason, applies in refused.items() if applies), None)


def check_not_joined(wrapper: DistributedDataParallel | None) -> None:
    """Raise LostError in `join()`: ranks without batches repeat the reductions as they were."""
    if wrapper is not None and wrapper._join_config.enable:
        raise LostError(JOINED)


def rebuild_buckets(wrapper: DistributedDataParallel) -> None:
    """Reduce from now on what requires a gradient now; options and communication hooks stay.

    All ranks call it at the same time, between a backward and a forward pass, or at the beginning
    of the model's forward pass within the wrapper's. It does what unpickling a wrapper does,
    without communication. After an interrupt it can be called again.
    """
    held: Any = wrapper
    torch_distributed: Any = distributed
    parameters, expects_sparse = held._build_params_for_reducer()
    names = held._build_debug_param_to_name_mapping(parameters)
    held._has_rebuilt_buckets = False
    held._ddp_init_helper(parameters, expects_sparse, names, held.static_graph)
    for hook, state in held._comm_hooks:  # the list stays whole, also if we are interrupted
        held.logger._set_comm_hook_name(hook.__qualname__)
        torch_distributed._register_comm_hook(held.reducer, state, hook)
