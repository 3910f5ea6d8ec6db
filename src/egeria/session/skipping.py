"""Keeping the activation cache at the boundary that the freezer has reached."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from egeria.cache import (
    ActivationCache,
    MemoryCache,
    NoSamplesError,
    Outlook,
    SampleFeed,
    ShardSampler,
    length_of,
)
from egeria.distributed import fsdp2
from egeria.distributed.ranks import exchange, world_size
from egeria.journal import Recorder
from egeria.model.batch import Batch
from egeria.model.cut import LayerModule
from egeria.model.hooks import Hook, sweep
from egeria.model.undisturbed import is_own_pass
from egeria.session.training import Training

WHAT = "skipping the frozen forward pass"
COMPILED = "the model is compiled, and its graphs have the whole forward pass in them"
SHARDED = (
    "its parameters are sharded over the processes (fully_shard), which gather them in every "
    "forward pass, so that a batch could be skipped only where every process has stored all "
    "samples of its own; the cache works with DistributedDataParallel"
)
SYNCHRONISED = "it has SyncBatchNorm layers, for which all processes must run a batch together"
NOT_DEALT_ONCE = (
    "each of several processes stores what it computes, and only a loader with "
    "`egeria.ShardSampler` gives a process the same samples in every epoch"
)


class Skipping:
    """Tells the cache when the boundary moves, and what is ahead."""

    def __init__(
        self,
        training: Training,
        cache: ActivationCache | MemoryCache,
        find_refusal: Callable[[], str],
    ) -> None:
        self._training, self._cache, self._find_refusal = training, cache, find_refusal
        self._calls = Calls(training.model, training.device_type)
        self._depth = 0
        self.forwards_per_step = 1
        """Training calls of the model between two steps of the optimizer."""
        self._is_refused = False
        if isinstance(cache, ActivationCache):
            self._calls.skip_with(cache.forward)

    def follow(self, frozen: Sequence[LayerModule], steady_steps: float | None, step: int) -> None:
        """Move the boundary of the cache if layers were frozen or thawed since the last call.

        Args:
            frozen: the frozen layer modules, front to back.
            steady_steps: for how many steps the boundary stays; None for the rest of the run.
            step: optimizer steps so far.
        """
        if self._is_refused or len(frozen) == self._depth:
            return
        self._depth = len(frozen)
        if reason := self._find_refusal():
            self._refuse(frozen, reason)
            return
        self._cache.move_boundary(tuple(frozen), self._outlook(steady_steps, step))
        if isinstance(self._cache, MemoryCache):
            if self._cache.is_idle:
                self._calls.close()
            else:
                self._calls.skip_with(partial(self._skip_from_memory, self._cache))

    def close(self) -> None:
        """Stop for good: the loader and the forward pass are the user's own again."""
        self._calls.close()
        self._cache.close()

    def _skip_from_memory(self, cache: MemoryCache, call: Callable[[], Any], batch: Batch) -> Any:
        """Make a forward pass; the model is left alone once the cache only computes."""
        output = cache.forward(call, batch)
        if cache.is_idle:
            self._calls.close()
        return output

    def _refuse(self, frozen: Sequence[LayerModule], reason: str) -> None:
        """Stop for good, for a reason that the user is told if skipping was asked for."""
        self._is_refused = True
        self.close()
        if isinstance(self._cache, ActivationCache):
            self._training.recorder.decline(WHAT, reason)
        else:
            self._cache.refusal = reason
            self._cache.move_boundary(frozen, Outlook(steps_ahead=None))

    def _outlook(self, steady_steps: float | None, step: int) -> Outlook:
        """Return when the boundary can move at the earliest."""
        total_steps = self._training.total_steps
        limits = [steady_steps, None if total_steps is None else max(0.0, total_steps - step)]
        return Outlook(
            steps_ahead=min((limit for limit in limits if limit is not None), default=None),
            forwards_per_step=float(self.forwards_per_step),
        )


def begin_skipping(
    training: Training, loader: Any, spend: Callable[[float, float], None]
) -> Skipping | None:
    """Return what skips the frozen forward pass of a run; None where nothing does. All processes of
    a job call this.
    """
    config, recorder = training.config.cache, training.recorder
    run_directory = exchange(recorder.directory)[0]  # only the first process knows it
    if config.enabled is False or training.config.policy.name == "none":
        return None
    is_dealt_once = isinstance(getattr(loader, "sampler", None), ShardSampler)
    find_refusal = partial(_refusal, training, is_dealt_once)
    if not config.is_on_disk:
        in_memory = MemoryCache(
            model=training.model,
            settings=config,
            recorder=recorder,
            spend=spend,
            num_batches=length_of(loader) or None,
            num_local=_num_local(),
        )
        return Skipping(training, in_memory, find_refusal)
    if reason := find_refusal():
        recorder.decline(WHAT, reason)
        return None
    feed, reason = _follow(loader, recorder)
    on_disk = ActivationCache(
        model=training.model,
        feed=feed,
        directory=Path(config.directory or run_directory or "."),
        settings=config,
        recorder=recorder,
        spend=spend,
        refusal=reason,
    )
    return Skipping(training, on_disk, find_refusal)


def _num_local() -> int:
    """Return how many processes of the job are on this host, as its launcher tells; all of them
    where it does not.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() and int(told) > 0 else world_size()


def _refusal(training: Training, is_dealt_once: bool) -> str:
    """Return why the forward pass of a model is not skipped; empty where it may be."""
    if training.compilation is not None:
        return COMPILED
    if fsdp2.is_sharded(training.model):
        return SHARDED
    if world_size() > 1:
        if any(isinstance(module, nn.SyncBatchNorm) for module in training.model.modules()):
            return SYNCHRONISED
        if not is_dealt_once:
            return NOT_DEALT_ONCE
    return ""


def _follow(loader: Any, recorder: Recorder) -> tuple[SampleFeed | None, str]:
    """Return what knows the samples of batches, or None and why there is nothing."""
    try:
        return SampleFeed(loader), ""
    except NoSamplesError as error:
        recorder.decline("storing activations", str(error))
        return None, str(error)


Skip = Callable[[Callable[[], Any], Batch], Any]
"""Makes a forward pass: it is given the model's own and its arguments."""


class Calls:
    """Lets the cache make the forward passes of the training calls of a model.

    Calls in evaluation mode or without gradients, and passes of our own, go by.

    Args:
        model: without wrappers.
        device_type: the type of device that it is on.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self._model, self._device_type = model, device_type
        self._skip: Skip | None = None
        self._batch: Batch | None = None

    def skip_with(self, skip: Skip) -> None:
        """Let `skip` make the forward passes from now on."""
        attributes, self._skip = vars(self._model), skip
        found = attributes.get("forward")
        if not isinstance(found, SkippingForward):
            sweep(self._model, self)  # of a call that was interrupted
            hook = Hook(self, Calls._begin)
            self._model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            attributes["forward"] = SkippingForward(self, self._model, found)

    def close(self) -> None:
        """Leave the model as it was found; can be called again."""
        attributes, self._skip = vars(self._model), None
        found = attributes.get("forward")
        if isinstance(found, SkippingForward):
            attributes.pop("forward")
            if found.own_forward is not None:
                attributes["forward"] = found.own_forward
        sweep(self._model, self)

    def forward(self, call: Callable[[], Any]) -> Any:
        """Make the forward pass of a call that the hook has seen begin."""
        batch, self._batch = self._batch, None
        if batch is None or self._skip is None or is_own_pass():
            return call()
        return self._skip(call, batch)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._batch = None
        if model.training and torch.is_grad_enabled() and not is_own_pass():
            self._batch = Batch.of_call(args, kwargs, self._device_type)


class SkippingForward:
    """The `forward` of a model while the cache may skip its front; copies have the model's own.

    Args:
        calls: of the model.
        model: the model.
        own_forward: what was an attribute of this very model before; None for its class's.
    """

    def __init__(self, calls: Calls, model: nn.Module, own_forward: Any) -> None:
        self._calls, self._model, self.own_forward = calls, model, own_forward
        self.__wrapped__: Callable[..., Any] = model.forward  # its signature is read from here

    @property
    def __code__(self) -> Any:
        """What `torch.export` asks a `forward` for."""
        return self.__wrapped__.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the forward pass, or have the cache make it; where it is compiled, make it."""
        if torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        return self._calls.forward(partial(self.__wrapped__, *args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.own_forward is not None:
            return copy.deepcopy(self.own_forward, memo)
        copied = memo.get(id(self._model), self._model)
        return MethodType(type(self._model).forward, copied)

    def __reduce__(self) -> Any:
        if self.own_forward is not None:
            return itemgetter(0), ([self.own_forward],)
        return getattr, (self._model, "forward")
