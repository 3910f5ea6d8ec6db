"""How many processes train together: one strategy for each way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from egeria import dist
from egeria.layers.shards import choose_dtypes_again, is_sharded, reshard, without_wrapper
from egeria.parallel.refusals import refuse_model, refuse_options, refuse_shards, refuse_wrapper

_BARE = (
    "the model is trained by several processes and called without DistributedDataParallel, so "
    "that nothing joins "
    "their gradients. Wrap it: model = DistributedDataParallel(model), before attach or after it"
)
_PART = (
    "DistributedDataParallel joins only some processes of the job. Wrap the model before "
    "attach, and pass the wrapper"
)
FIRST_ITERATIONS = 2
"""Iterations after which buckets are laid out for good: they are ordered again after the first
backward pass."""


class ParallelStrategy:
    """What changes when several processes train one model; by itself nothing.

    All of them make the same calls, in the same order.

    Args:
        refused: why nothing is frozen, where the model trains in a way that cannot be followed.
    """

    def __init__(self, refused: str | None = None) -> None:
        self._refused = refused
        self.rank = 0
        """Which of the processes this is; 0 evaluates, keeps the journal and leads."""
        self.num_ranks = 1
        self._group: Any = None
        """What the processes exchange numbers of the CPU in; None where there is one only."""
        self.given: nn.Module | None = None
        """What was given to `attach`; None for a bare replica, whose wrapper is not known yet."""
        self._model = nn.Module()
        """The model itself, without any wrapper."""

    @property
    def is_compiled(self) -> bool:
        """Whether what was given to `attach` is compiled."""
        return self.given is not None and without_wrapper(self.given) is not self.given

    def take(self, model: nn.Module) -> nn.Module:
        """Take over what was given to `attach`; return the model itself, without any wrapper."""
        self.given, self._model = model, without_wrapper(model)
        return self._model

    def refusal(self) -> str | None:
        """Return why nothing can be frozen under the strategy, with the way out; None if it can."""
        return self._refused or refuse_model(self._model)

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all processes, by rank; they have the same length.

        Raises:
            RuntimeError: a process did not answer within the timeout of the process group.
        """
        if self._group is None:
            return [list(row)]
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        distributed.all_gather(rows, mine, group=self._group)
        return [entry.tolist() for entry in rows]

    def settle(self) -> None:
        """Put parameters into the form in which what trains can be changed."""

    def see_call(self) -> bool:
        """See a training call of the model begin, within whatever wraps it.

        Returns:
            Whether it is made in `join()`, where processes that have no batches left make none.
        """
        return False

    def update(self, frozen: Collection[str] = ()) -> None:
        """Let what wraps the model follow, now that gradients may have been switched on or off.

        Args:
            frozen: names of the submodules that are frozen now.
        """


def choose_parallel(model: nn.Module) -> ParallelStrategy:
    """Return the strategy for what was given to `attach`; a bare model in a job of several
    processes is a replica.
    """
    refused = refuse_wrapper(model) or (refuse_shards(model) if is_sharded(model) else None)
    if refused is None and is_sharded(model):
        return Sharded()
    is_replica = (
        isinstance(without_wrapper(model), DistributedDataParallel) or dist.world_size() > 1
    )
    return Replicas() if refused is None and is_replica else SingleProcess(refused)


class SingleProcess(ParallelStrategy):
    """Decides for itself and calls the model as it is."""


class Replicas(ParallelStrategy):
    """Replicas of the model under `DistributedDataParallel`: what is frozen drops out of the
    reduction of gradients.

    The wrapper is the one that was given, or the one that a bare model is found in at its first
    training call, as frameworks wrap it. It stays the same object with its options and
    communication hooks, and its buckets are rebuilt whenever layers freeze or thaw.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wrapper: Any = None
        self._is_bare = False
        """Whether the last training call was in no wrapper, as far as that is known."""
        self._trained: tuple[str, ...] = ()
        """Names of the parameters that are reduced."""
        self._frozen: Collection[str] = ()
        """Names of the submodules that are frozen."""
        self._idle: frozenset[str] = frozenset()
        """Names of the buffers that are not broadcast any more."""

    def take(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        wrapper, group = without_wrapper(model), distributed.group.WORLD
        if isinstance(wrapper, DistributedDataParallel):
            self.given, self._model = model, without_wrapper(wrapper.module)
            self._adopt(wrapper)
            group = wrapper.process_group
        else:
            self._model = wrapper
        self.rank, self.num_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        self._group = _group_on_the_cpu(group)
        return self._model

    def refusal(self) -> str | None:
        """Refuse what cannot be watched, and options that fix at the first iteration what is
        reduced.
        """
        if self._wrapper is None:
            return super().refusal() or (_BARE if self._is_bare else None)
        return super().refusal() or refuse_options(self._wrapper)

    def see_call(self) -> bool:
        """Find the wrapper of a bare model at the first training call in one."""
        if self._wrapper is None:
            self._find_wrapper()
        return self._wrapper is not None and bool(self._wrapper._join_config.enable)

    def _find_wrapper(self) -> None:
        find: Any = DistributedDataParallel._get_active_ddp_module
        wrapper = find()
        self._is_bare = wrapper is None
        if wrapper is None:
            return
        if distributed.get_world_size(wrapper.process_group) != self.num_ranks:
            self._refused = _PART
        else:
            self._adopt(wrapper)
            if self._refused is None and refuse_options(wrapper) is None and self._frozen:
                # A resumed state has frozen layers before the wrapper was known, or made.
                self._rebuild()
                wrapper.reducer.prepare_for_forward()

    def update(self, frozen: Collection[str] = ()) -> None:
        """Rebuild the buckets of the wrapper if other parameters train than before."""
        self._frozen = tuple(frozen)
        if self._wrapper is not None and (self._trainable(), self._idle_buffers()) != (
            self._trained,
            self._idle,
        ):
            self._rebuild()

    def _rebuild(self) -> None:
        """Reduce from now on what needs a gradient now."""
        idle = self._idle_buffers()
        _rebuild(self._wrapper, idle_before=self._idle, idle=idle)
        self._trained, self._idle = self._trainable(), idle

    def _idle_buffers(self) -> frozenset[str]:
        return frozenset(_buffers_of(self._wrapper.module, self._model, self._frozen))

    def _adopt(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._trained = self._trainable()

    def _trainable(self) -> tuple[str, ...]:
        named = self._wrapper.module.named_parameters()
        return tuple(name for name, parameter in named if parameter.requires_grad)


class Sharded(ParallelStrategy):
    """Processes that hold a part of each parameter (`fully_shard`, FSDP2) and gather them for each
    pass.

    A parameter without a gradient has none to reduce, and behind the frozen front nothing is
    gathered a second time, so that there is nothing to wrap again. All processes of the job take
    part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.num_ranks = distributed.get_rank(), distributed.get_world_size()
        self._group = _group_on_the_cpu(distributed.group.WORLD)

    def take(self, model: nn.Module) -> nn.Module:
        """Return the model, its parameters in parts."""
        bare = super().take(model)
        reshard(bare)
        return bare

    def refusal(self) -> str | None:
        """Refuse what cannot be watched, and what is in parts of another kind."""
        given = self._model if self.given is None else self.given
        return super().refusal() or refuse_shards(given)

    def settle(self) -> None:
        """Put parameters in parts, where an evaluation of the loop's own has left whole ones: no
        change would stick.
        """
        reshard(self._model)

    def update(self, frozen: Collection[str] = ()) -> None:
        """Make the parts ready for what trains now."""
        for module in self._model.modules():
            choose_dtypes_again(module)


def _group_on_the_cpu(group: Any) -> Any:
    """Return a process group of the same ranks that carries numbers of the CPU, so that no device
    waits for them.

    Where the group has none, one is made; all ranks make it together.
    """
    if "cpu:" in distributed.get_backend_config(group):
        return group
    try:
        timeout = group._get_backend(torch.device("cuda")).options._timeout
    except (RuntimeError, AttributeError):
        timeout = None  # the default of gloo
    return distributed.new_group(
        ranks=distributed.get_process_group_ranks(group),
        backend="gloo",
        timeout=timeout,
        use_local_synchronization=True,
    )


def _buffers_of(wrapped: nn.Module, model: nn.Module, frozen: Collection[str]) -> list[str]:
    """Return the names of the buffers of frozen submodules of a model, in the
    module that holds it.
    """
    prefix = next(name for name, module in wrapped.named_modules() if module is model)
    return [
        ".".join(part for part in (prefix, name, buffer) if part)
        for name in frozen
        for buffer, _ in model.get_submodule(name).named_buffers()
    ]


def _rebuild(
    wrapper: DistributedDataParallel, *, idle_before: frozenset[str], idle: frozenset[str]
) -> None:
    """Reduce from now on what needs a gradient now.

    Does what unpickling a wrapper does, without its checks across processes, which take most of the
    time: that all ranks train the same parameters is for the caller to see to. The old buckets go
    first, so that there is never more than one set of them.

    Args:
        wrapper: the wrapper.
        idle_before: names of buffers that were left out of the broadcast so far.
        idle: names of those to leave out from now on. New ones are made equal to those of the first
            rank once more, if the wrapper did that before every forward pass.
    """
    held: Any = wrapper
    if not hasattr(held, "buffer_hook"):  # one of the user's own wants to see all buffers
        if idle - idle_before and held.broadcast_buffers:
            held._sync_buffers()
        held.parameters_to_ignore = (set(held.parameters_to_ignore) - idle_before) | idle
    del held.reducer, held.logger
    for _, state in held._comm_hooks:
        _forget_buckets(state)
    hooks, held._comm_hooks = list(held._comm_hooks), []
    parameters, expects_sparse = held._build_params_for_reducer()
    names = held._build_debug_param_to_name_mapping(parameters)
    held._has_rebuilt_buckets = False
    held._ddp_init_helper(parameters, expects_sparse, names, False)
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)


def _forget_buckets(state: Any) -> None:
    """Restart PowerSGD where the buckets are others: it keeps errors and factors by bucket."""
    if not hasattr(state, "start_powerSGD_iter"):
        return
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        getattr(state, name, {}).clear()
    state.start_powerSGD_iter = max(state.start_powerSGD_iter, state.iter + FIRST_ITERATIONS)
