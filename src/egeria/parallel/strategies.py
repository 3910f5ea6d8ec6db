"""How many processes train one model: the seam, and one strategy for each way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from egeria import dist
from egeria.layers.shards import choose_dtypes_again, is_sharded, reshard, without_wrapper
from egeria.parallel.rebuild import rebuild
from egeria.parallel.refusals import refuse_model, refuse_options, refuse_shards, refuse_wrapper


class ParallelStrategy(Protocol):
    """What changes when several processes train one model.

    All of them make the same calls, in the same order.
    """

    rank: int
    """Which of the processes this is; 0 evaluates, keeps the journal and leads."""
    num_ranks: int

    def take(self, model: nn.Module) -> nn.Module:
        """Take over what was given to `attach`; return the model itself, without any wrapper."""
        ...

    def refusal(self) -> str | None:
        """Return why nothing can be frozen under the strategy, with the way out; None if it can."""
        ...

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all processes, by rank; they have the same length.

        Raises:
            RuntimeError: a process did not answer within the time that the job allows.
        """
        ...

    def settle(self) -> None:
        """Put parameters into the form in which what trains can be changed."""
        ...

    def rewrap(self, frozen: Collection[str] = ()) -> nn.Module:
        """Return what the loop is to call, now that gradients may have been switched on or off.

        Args:
            frozen: names of the submodules that are frozen now.
        """
        ...


def choose_parallel(model: nn.Module) -> ParallelStrategy:
    """Return the strategy for what was given to `attach`.

    A bare model in a job of several processes is one replica of it, and `attach` wraps it.
    """
    refused = refuse_wrapper(model)
    if refused is None and is_sharded(model):
        refused = refuse_shards(model)
        if refused is None:
            return Sharded()
    if refused is not None:
        return SingleProcess(refused)
    if isinstance(without_wrapper(model), DistributedDataParallel) or dist.world_size() > 1:
        return Replicas()
    return SingleProcess()


class SingleProcess:
    """Decides for itself and calls the model as it is.

    Args:
        refused: why nothing is frozen, where the model trains in a way that cannot be followed.
    """

    rank, num_ranks = 0, 1

    def __init__(self, refused: str | None = None) -> None:
        self._refused = refused
        self._called: nn.Module = nn.Module()

    def take(self, model: nn.Module) -> nn.Module:
        """Return the model, without what `torch.compile` put around it."""
        self._called = model
        return without_wrapper(model)

    def refusal(self) -> str | None:
        """Refuse what this strategy was made to refuse, and models whose layers cannot be watched."""
        return self._refused or refuse_model(without_wrapper(self._called))

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Return the one row."""
        return [list(row)]

    def settle(self) -> None:
        """Nothing is in another form."""

    def rewrap(self, frozen: Collection[str] = ()) -> nn.Module:
        """Return what was given to `take`."""
        return self._called


class Replicas:
    """Replicas of the model under `DistributedDataParallel`: what is frozen drops out of the reduction of gradients.

    The wrapper stays the same object, so that the loop continues to call it; the buckets in it are rebuilt whenever
    layers freeze or thaw. Its options and communication hooks stay.

    Args:
        options: of `DistributedDataParallel`, for a bare model, which is wrapped here.
    """

    def __init__(self, **options: Any) -> None:
        self.rank, self.num_ranks = 0, 1
        self._options = options
        self._called: nn.Module = nn.Module()
        self._wrapper: Any = None
        self._group: Any = None
        self._trained: tuple[str, ...] = ()
        """Names of the parameters that are reduced."""
        self._idle: frozenset[str] = frozenset()
        """Names of the buffers that are not broadcast any more."""

    def take(self, model: nn.Module) -> nn.Module:
        """Return the model itself; a bare one is wrapped first."""
        wrapper: Any = without_wrapper(model)
        if not isinstance(wrapper, DistributedDataParallel):
            model = wrapper = DistributedDataParallel(model, **{**_device(model), **self._options})
        self._called, self._wrapper, group = model, wrapper, wrapper.process_group
        self.rank, self.num_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        self._group = _group_on_the_cpu(group)
        self._trained = self._trainable()
        return without_wrapper(wrapper.module)

    def refusal(self) -> str | None:
        """Refuse what cannot be watched, and options that fix at the first iteration what is reduced."""
        return refuse_model(without_wrapper(self._wrapper.module)) or refuse_options(self._wrapper)

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all processes, by rank.

        Raises:
            RuntimeError: a process did not answer within the timeout of the process group.
        """
        return _all_gather(row, self._group)

    def settle(self) -> None:
        """Nothing is in another form."""

    def rewrap(self, frozen: Collection[str] = ()) -> nn.Module:
        """Return the wrapper, its buckets rebuilt if other parameters train than before."""
        trained, idle = self._trainable(), frozenset(_buffers_of(self._wrapper.module, frozen))
        if (trained, idle) != (self._trained, self._idle):
            rebuild(self._wrapper, idle_before=self._idle, idle=idle)
            self._trained, self._idle = trained, idle
        return self._called

    def _trainable(self) -> tuple[str, ...]:
        named = self._wrapper.module.named_parameters()
        return tuple(name for name, parameter in named if parameter.requires_grad)


class Sharded:
    """Processes that hold a part of each parameter (`fully_shard`, FSDP2) and gather them for each pass.

    A parameter without a gradient has none to reduce, and behind the frozen front nothing is gathered a second time,
    so that there is nothing to wrap again. All processes of the job take part.
    """

    def __init__(self) -> None:
        self.rank, self.num_ranks = distributed.get_rank(), distributed.get_world_size()
        self._called: nn.Module = nn.Module()
        self._group = _group_on_the_cpu(distributed.group.WORLD)

    def take(self, model: nn.Module) -> nn.Module:
        """Return the model, its parameters in parts."""
        self._called, bare = model, without_wrapper(model)
        reshard(bare)
        return bare

    def refusal(self) -> str | None:
        """Refuse what cannot be watched, and what is in parts of another kind."""
        return refuse_model(without_wrapper(self._called)) or refuse_shards(self._called)

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all processes, by rank.

        Raises:
            RuntimeError: a process did not answer within the timeout of the process group.
        """
        return _all_gather(row, self._group)

    def settle(self) -> None:
        """Put parameters in parts, where an evaluation of the loop's own has left whole ones: no change would stick."""
        reshard(without_wrapper(self._called))

    def rewrap(self, frozen: Collection[str] = ()) -> nn.Module:
        """Return what was given to `take`, ready for what trains now."""
        for module in without_wrapper(self._called).modules():
            choose_dtypes_again(module)
        return self._called


def _all_gather(row: Sequence[float], group: Any) -> list[list[float]]:
    mine = torch.tensor(row, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(rows, mine, group=group)
    return [entry.tolist() for entry in rows]


def _group_on_the_cpu(group: Any) -> Any:
    """Return a process group of the same ranks that carries numbers of the CPU, so that no device waits for them.

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


def _device(model: nn.Module) -> dict[str, Any]:
    """Return the option for a replica on one accelerator; nothing for others."""
    devices = {parameter.device for parameter in model.parameters()}
    is_single = len(devices) == 1 and next(iter(devices)).type not in ("cpu", "meta")
    return {"device_ids": [next(iter(devices))]} if is_single else {}


def _buffers_of(model: nn.Module, frozen: Collection[str]) -> list[str]:
    bare = without_wrapper(model)
    prefix = "" if bare is model else "_orig_mod."
    return [
        f"{prefix}{name}.{buffer}" if name else f"{prefix}{buffer}"
        for name in frozen
        for buffer, _ in bare.get_submodule(name).named_buffers()
    ]
