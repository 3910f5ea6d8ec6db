"""Keeping the activation cache at the boundary that the freezer has reached."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

from torch import nn

from egeria.cache import Cache, ShardSampler
from egeria.distributed import fsdp2
from egeria.distributed.ranks import exchange, world_size
from egeria.model.cut import LayerModule
from egeria.policy import Status, Wants
from egeria.session.checks import length_of
from egeria.session.clock import Clock
from egeria.session.training import Training

COMPILED = "the model is compiled, and its graphs have the whole forward pass in them"
SHARDED = (
    "its parameters are sharded over the processes (fully_shard), which gather them in every "
    "forward pass; the cache works with DistributedDataParallel"
)
SYNCHRONISED = "it has SyncBatchNorm layers, for which all processes must run a batch together"
NOT_DEALT_ONCE = (
    "each of several processes stores what it computes, and only a loader with "
    "`egeria.ShardSampler` gives a process the same samples in every epoch"
)


def make_cache(training: Training, spend: Callable[[float, float], None]) -> Cache | None:
    """Return what skips the frozen forward pass of a run; None where nothing does. All processes of
    a job call this.

    Where nobody asked for it, it takes a plan, which tells how long a front stays frozen.
    """
    config, policy_name = training.config.cache, training.config.policy.name
    directory = exchange(training.recorder.directory)[0]  # only the first process knows it
    is_unasked = config.enabled == "auto" and policy_name == "egeria"
    if config.enabled is False or policy_name == "none" or is_unasked:
        return None
    return Cache(
        model=training.model,
        settings=config,
        recorder=training.recorder,
        spend=spend,
        directory=directory,
        loader=training.loader,
        num_batches=length_of(training.loader),
        num_local=_num_local(),
    )


def follow(
    cache: Cache, training: Training, frozen: Sequence[LayerModule], epochs: float | None
) -> None:
    """Move the boundary of the cache: layers were frozen or thawed.

    Args:
        cache: of the run.
        training: of the run.
        frozen: the frozen layer modules, front to back.
        epochs: for how many epochs the boundary stays; None where that is not known.
    """
    if frozen and (reason := _refusal(training)):
        cache.refuse(frozen[-1].name, reason)
    else:
        cache.follow(tuple(frozen), epochs)


def epochs_until_move(
    clock: Clock, wants: Wants, status: Status, epoch_steps: int | None
) -> float | None:
    """Return for how many epochs a boundary stays; None where that is not known."""
    moves = wants.next_step(clock.step)
    if wants.interval_steps is not None and wants.plasticity_of is not None:
        moves = clock.step + (2 * max(1, status.window) - 1) * clock.interval_steps
    steps = max(0.0, min(moves, clock.total_steps or math.inf) - clock.step)
    return steps / epoch_steps if epoch_steps and steps < math.inf else None


def _num_local() -> int:
    """Return how many processes of the job its launcher says are on this host, else all."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() and int(told) > 0 else world_size()


def _refusal(training: Training) -> str:
    """Return why the forward pass of a model is not skipped; empty where it may be."""
    if training.compilation is not None:
        return COMPILED
    if fsdp2.is_sharded(training.model):
        return SHARDED
    if world_size() > 1:
        if any(isinstance(module, nn.SyncBatchNorm) for module in training.model.modules()):
            return SYNCHRONISED
        if not isinstance(getattr(training.loader, "sampler", None), ShardSampler):
            return NOT_DEALT_ONCE
    return ""
