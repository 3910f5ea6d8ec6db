"""Making the buckets of a `DistributedDataParallel` again, in place: everything that reaches into its inside."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

FIRST_ITERATIONS = 2
"""Iterations after which buckets are laid out for good: they are ordered again after the first backward pass."""


def rebuild(wrapper: DistributedDataParallel, *, idle_before: frozenset[str], idle: frozenset[str]) -> None:
    """Reduce from now on what needs a gradient now.

    Does what unpickling a wrapper does, without its checks across processes, which take most of the time: that
    all ranks train the same parameters is for the caller to see to. The old buckets go first, so that there is
    never more than one set of them.

    Args:
        wrapper: the wrapper.
        idle_before: names of buffers that were left out of the broadcast so far.
        idle: names of those to leave out from now on. New ones are made equal to those of the first rank once
            more, if the wrapper did that before every forward pass.
    """
    held: Any = wrapper
    if not hasattr(held, "buffer_hook"):  # one of the user's own wants to see all buffers
        if idle - idle_before and held.broadcast_buffers:
            held._sync_buffers()
        held.parameters_to_ignore = (set(held.parameters_to_ignore) - idle_before) | idle
    hooks, held._comm_hooks = list(held._comm_hooks), []
    del held.reducer, held.logger
    parameters, expects_sparse = held._build_params_for_reducer()
    names = held._build_debug_param_to_name_mapping(parameters)
    held._has_rebuilt_buckets = False
    held._ddp_init_helper(parameters, expects_sparse, names, False)
    for hook, state in hooks:
        _forget_buckets(state)
        wrapper.register_comm_hook(state, hook)


def _forget_buckets(state: Any) -> None:
    """Restart PowerSGD where the buckets are others: it keeps errors and factors by bucket."""
    if not hasattr(state, "start_powerSGD_iter"):
        return
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        getattr(state, name, {}).clear()
    state.start_powerSGD_iter = max(state.start_powerSGD_iter, state.iter + FIRST_ITERATIONS)
