"""Data-parallel replicas: what is frozen drops out of the reduction of gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from egeria.layers.shards import without_wrapper
from egeria.parallel.numbers import Numbers
from egeria.parallel.rebuild import rebuild
from egeria.parallel.refusals import refuse_model, refuse_options


class Replicas:
    """Replicas of the model under `DistributedDataParallel`.

    The wrapper stays the same object, so that what the loop holds goes on being what it calls; the buckets
    in it are rebuilt whenever layers freeze or thaw. Its options and communication hooks stay.

    Args:
        options: of `DistributedDataParallel`, for a bare model, which is wrapped here.
    """

    def __init__(self, **options: Any) -> None:
        self.rank, self.num_ranks = 0, 1
        self._options = options
        self._called: nn.Module = nn.Module()
        self._wrapper: Any = None
        self._numbers: Numbers | None = None
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
        self._numbers = Numbers(group)
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
        assert self._numbers is not None, "the model was not taken yet"
        return self._numbers.exchange(row)

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


def _device(model: nn.Module) -> dict[str, Any]:
    """Return the device that a replica on one accelerator is told of; nothing for others."""
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
