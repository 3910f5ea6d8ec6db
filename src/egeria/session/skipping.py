"""Keeping the activation cache at the boundary that the freezer has reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DistributedSampler

from egeria.cache import (
    ActivationCache,
    CacheDirectory,
    MemoryCache,
    NoSamplesError,
    Outlook,
    SampleFeed,
    ShardSampler,
    Share,
    StoreError,
    length_of,
)
from egeria.config import Config
from egeria.controller import spare_cores
from egeria.journal import Recorder
from egeria.layers.modules import LayerModule
from egeria.policy import Foreseeing, Policy
from egeria.session.following import Training
from egeria.session.ranks import Ranks, Subject
from egeria.session.timing import IntervalClock

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SUBDIRECTORY = "cache"
WHAT = "skipping the frozen forward pass"
COMPILED = "the model is compiled, and its graphs have the whole forward pass in them"
SHARDED = (
    "its parameters are sharded over the processes (fully_shard), which gather them in every "
    "forward pass, so that a "
    "batch could be skipped only where every process has stored all samples of its own; the cache "
    "works with "
    "DistributedDataParallel"
)


class Skipping:
    """Stands between the session and the cache: informs it when the boundary moves, and what is
    ahead.
    """

    def __init__(
        self,
        training: Training,
        cache: ActivationCache | MemoryCache,
        make_outlook: Callable[..., Outlook],
    ) -> None:
        self._training = training
        self._cache = cache
        self._make_outlook = make_outlook
        self._depth = 0
        self._is_refused = False
        self._begin: tuple[int, int] | None = None
        """The step, and the training calls, when this first looked: a resumed run does not begin at
        zero."""
        if isinstance(cache, ActivationCache):
            training.hooks.skip_with(cache.forward)
        elif cache.repeats is not None and not cache.find_refusal():
            training.hooks.watch_with(cache.repeats.wants_next, cache.observe)

    def count_from(self, step: int) -> None:
        """Count training calls from a step that the run was taken to."""
        self._begin = step, self._training.hooks.num_calls

    def follow(self, frozen: Sequence[LayerModule], policy: Policy, clock: IntervalClock) -> None:
        """Move the boundary of the cache if layers were frozen or thawed since the last call."""
        if self._begin is None:
            self._begin = clock.step, self._training.hooks.num_calls
        if isinstance(self._cache, MemoryCache) and not self._cache.is_watching:
            self._training.hooks.watch_with(None, None)
        if self._is_refused:
            return
        if len(frozen) == self._depth:
            if isinstance(self._cache, MemoryCache) and self._cache.is_idle:
                self._training.hooks.skip_with(None)
            return
        self._depth = len(frozen)
        outlook = Outlook(steps_ahead=None)
        try:
            outlook = self._outlook(policy, clock)
        finally:  # it moves in all processes, whatever fails in one
            self._cache.move_boundary(tuple(frozen), outlook)
            if isinstance(self._cache, MemoryCache) and not self._cache.is_idle:
                self._training.hooks.skip_with(self._cache.forward)

    def refuse(self, reason: str) -> None:
        """Stop for good, for a reason that the user is told if skipping was asked for."""
        self._stop()
        self._is_refused = isinstance(self._cache, ActivationCache)
        if isinstance(self._cache, MemoryCache):
            self._cache.refuse(reason)
        else:
            self._cache.close()
            self._training.recorder.decline(WHAT, reason)

    def close(self) -> None:
        """Stop for good: the loader and the forward pass are the user's own again."""
        self._stop()
        self._cache.close()

    def _stop(self) -> None:
        self._training.hooks.skip_with(None)
        self._training.hooks.watch_with(None, None)

    def _outlook(self, policy: Policy, clock: IntervalClock) -> Outlook:
        """Return when the boundary can move at the earliest, by the policy's own rule."""
        total_steps, soonest = self._training.total_steps, _steady_steps(policy, clock)
        step, num_calls = self._begin or (0, 0)
        forwards = self._training.hooks.num_calls - num_calls
        limits = [soonest, None if total_steps is None else max(0.0, total_steps - clock.step)]
        return self._make_outlook(
            steps_ahead=min((limit for limit in limits if limit is not None), default=None),
            forwards_per_step=forwards / (clock.step - step) if clock.step > step else 1.0,
        )


def _steady_steps(policy: Policy, clock: IntervalClock) -> float | None:
    """Return the steps in which the boundary cannot move; None: to the end of the run."""
    if isinstance(policy, Foreseeing):
        return policy.steady_steps(clock.step, clock.interval_steps)
    return (
        None if policy.monitored is None else float((2 * policy.window - 1) * clock.interval_steps)
    )


def begin_skipping(
    training: Training, loader: Any, spend: Callable[[float, float], None]
) -> Skipping | None:
    """Return what skips the frozen forward pass of a run; None where nothing does. All processes of
    a job call this.
    """
    config, recorder = training.config, training.recorder
    host, reason = (
        (None, "") if training.ranks.is_alone else share_directory(training.ranks, config, recorder)
    )
    if config.cache.enabled is False:
        return None
    if not config.cache.is_on_disk:
        return _begin_in_memory(training, loader, spend)
    reason = reason or _refusal(training)
    if reason:
        recorder.decline(WHAT, reason)
        if host is not None:
            host.directory.close()
        return None
    feed, reason = _follow(loader, config.cache.id_column, recorder, is_shared=host is not None)
    cache = ActivationCache(
        model=training.model,
        feed=feed,
        make_directory=lambda: (
            _make_directory(config, place_of(config, recorder)) if host is None else host.directory
        ),
        settings=config.cache,
        recorder=recorder,
        spend=spend,
        refusal=reason,
        share=Share(is_alone=host is None, leads=host is None or host.leads),
    )
    if host is not None:
        cache.place()  # so that it is left with the cache, also where nothing was stored
    is_dealt_once = isinstance(getattr(loader, "sampler", None), ShardSampler)
    num_hosts = 1 if host is None or is_dealt_once else host.num_hosts  # that a sample may come to
    return Skipping(
        training, cache, partial(Outlook, spare_core=spare_cores(loader) >= 1, num_hosts=num_hosts)
    )


def _begin_in_memory(
    training: Training, loader: Any, spend: Callable[[float, float], None]
) -> Skipping:
    """Return what skips the frozen forward pass out of the memory of this process, and never
    touches the loader.
    """
    cache = MemoryCache(
        model=training.model,
        settings=training.config.cache,
        recorder=training.recorder,
        spend=spend,
        num_batches=length_of(loader) or None,
        find_refusal=partial(_refusal, training),
        num_local=_num_local(training),
    )
    is_dealt_once = isinstance(getattr(loader, "sampler", None), ShardSampler)
    return Skipping(
        training,
        cache,
        partial(Outlook, num_hosts=1 if is_dealt_once else training.parallel.num_ranks),
    )


def _num_local(training: Training) -> int:
    """Return how many processes of the job are on this host, as its launcher tells; all of them
    where it does not.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() and int(told) > 0 else training.parallel.num_ranks


def _refusal(training: Training) -> str:
    """Return why the forward pass of a model is not skipped; empty where it may be."""
    if training.hooks.is_compiled:
        return COMPILED
    if training.is_sharded:
        return SHARDED
    synchronises = any(isinstance(module, nn.SyncBatchNorm) for module in training.model.modules())
    if synchronises and not training.ranks.is_alone:
        return "it has SyncBatchNorm layers, for which all processes must run a batch together"
    return ""


def _follow(
    loader: Any, id_column: str | None, recorder: Recorder, *, is_shared: bool
) -> tuple[SampleFeed | None, str]:
    """Return what knows the samples of batches, or None and why there is nothing."""
    try:
        if is_shared and not _deals_out_one_dataset(loader):
            raise NoSamplesError(
                "a sample must have the same number in all processes, which only "
                "DistributedSampler and "
                "egeria.ShardSampler promise; give the loader one of them"
            )
        return SampleFeed(loader, id_column=id_column), ""
    except NoSamplesError as error:
        recorder.decline("storing activations", str(error))
        return None, str(error)


def _deals_out_one_dataset(loader: Any) -> bool:
    """Return whether all processes draw from the same data set: by their samplers, or by
    Accelerate's around one.
    """
    samplers = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    dealing = DistributedSampler  # ShardSampler is one too
    return any(
        isinstance(entry, dealing) or type(entry).__name__ == "BatchSamplerShard"
        for entry in samplers
    )


def _make_directory(config: Config, place: Path, token: str | None = None) -> CacheDirectory:
    settings = config.cache
    return CacheDirectory(
        place, token=token, limit_bytes=settings.limit_bytes, limit_share=settings.limit_share
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The processes of a job on one machine, seen from one of them."""

    directory: CacheDirectory
    leads: bool
    """Whether this is the first of them, which makes what the others join."""
    num_hosts: int
    """Of the whole job."""


def place_of(config: Config, recorder: Recorder) -> Path:
    """Return the cache directory of a run: the one that was set, else one beside the journal."""
    if config.cache.directory:
        return Path(config.cache.directory)
    return (recorder.directory or Path()) / SUBDIRECTORY


def share_directory(ranks: Ranks, config: Config, recorder: Recorder) -> tuple[Host | None, str]:
    """Let the processes of each host have one cache directory together; all processes of the job
    call this.

    Returns:
        What this process is part of, or None and why it is part of nothing.
    """
    place = place_of(config, recorder).absolute()
    rows = ranks.gather(Subject.ATTACHING, (_machine(), config.cache.is_on_disk, str(place)))
    if not any(enabled for _, enabled, _ in rows):
        return None, ""
    if not all(enabled for _, enabled, _ in rows):
        return None, "cache.enabled is not set in all processes of the job"
    if not config.cache.directory:  # of its own on each host, if it likes
        place = Path(rows[0][2])
    machines = [machine for machine, _, _ in rows]
    first = machines.index(machines[ranks.rank])
    num_hosts = len(set(machines))
    if num_hosts > 1:
        place /= (
            f"host-{first}"  # where hosts share a disk, each clears up after its own runs alone
        )
    leads, directory, reason = first == ranks.rank, None, ""
    if leads:
        directory, reason = _enter(config, place)
    token = ranks.gather(Subject.ATTACHING, directory and directory.token)[first]
    if token and not leads:
        directory, reason = _enter(config, place, token)
    if directory is None:
        return None, reason or "the first process of this host cannot use its directory"
    return Host(directory=directory, leads=leads, num_hosts=num_hosts), ""


def _enter(
    config: Config, place: Path, token: str | None = None
) -> tuple[CacheDirectory | None, str]:
    try:
        return _make_directory(config, place, token), ""
    except StoreError as error:
        return None, str(error)


def _machine() -> str:
    """Return what tells this machine, or this container on it, from others."""
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
