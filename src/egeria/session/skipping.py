"""Keeping the activation cache at the boundary that the freezer has reached."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from egeria.cache import ActivationCache, CacheDirectory, NoSamplesError, Outlook, SampleFeed
from egeria.config import Config
from egeria.controller import spare_cores
from egeria.policy import Foreseeing, Policy
from egeria.session.engine import Engine
from egeria.session.handle import ModelHandle
from egeria.session.recorder import Recorder

BASE_SEED = 0
"""Root of the seeds of fixed augmentation: the same for every run, as the paper's."""
SUBDIRECTORY = "cache"


class Skipping:
    """Stands between the session and the cache: tells it when the boundary moves, and what is ahead.

    Args:
        cache: makes the training forwards.
        handle: what the loop calls.
        total_steps: optimizer steps of the run, None where unknown.
        spare_core: whether a thread beside the training has a core to itself.
    """

    def __init__(
        self, cache: ActivationCache, handle: ModelHandle, *, total_steps: int | None, spare_core: bool
    ) -> None:
        self._cache = cache
        self._handle = handle
        self._total_steps = total_steps
        self._spare_core = spare_core
        self._depth = 0
        handle.skip_with(cache.forward)

    def follow(self, engine: Engine, num_steps: int, interval_steps: int) -> None:
        """Tell the cache if the boundary has moved since the last call."""
        depth = engine.applier.freezer.depth
        if depth != self._depth:
            self._depth = depth
            self._cache.move_boundary(engine.modules[:depth], self._outlook(engine, num_steps, interval_steps))

    def rest(self) -> None:
        """Leave the forward pass as it is, until a boundary is followed again; everything is about to thaw."""
        if self._depth:
            self._depth = 0
            self._cache.move_boundary((), Outlook(steps_ahead=None))

    def close(self) -> None:
        """Stop for good: the loader and the forward pass are the user's own again."""
        self._handle.skip_with(None)
        self._cache.close()

    def _outlook(self, engine: Engine, num_steps: int, interval_steps: int) -> Outlook:
        """Return when the boundary can move at the earliest, by the policy's own rule."""
        ahead = None if self._total_steps is None else float(self._total_steps - num_steps)
        soonest = _steady_steps(engine.policy, num_steps, interval_steps)
        if soonest is not None:
            ahead = soonest if ahead is None else min(ahead, soonest)
        return Outlook(
            steps_ahead=ahead,
            forwards_per_step=self._cache.num_forwards / max(1, num_steps),
            spare_core=self._spare_core,
        )


def _steady_steps(policy: Policy, num_steps: int, interval_steps: int) -> float | None:
    """Return the steps in which the boundary cannot move; None: to the end of the run."""
    if isinstance(policy, Foreseeing):
        return policy.steady_steps(num_steps, interval_steps)
    return None if policy.monitored is None else float((2 * policy.window - 1) * interval_steps)


def begin_skipping(
    model: nn.Module,
    handle: ModelHandle,
    loader: Any,
    *,
    config: Config,
    total_steps: int | None,
    recorder: Recorder,
    spend: Callable[[float, float], None],
) -> Skipping:
    """Make the cache of a run.

    Where samples cannot be told apart nothing is stored, which is said once; the frozen front may
    still run as inference.
    """
    settings = config.cache
    feed, refusal = _follow(loader, settings.id_column, recorder)
    cache = ActivationCache(
        model,
        feed,
        directory=partial(_directory, config, recorder),
        settings=settings,
        teller=recorder,
        spend=spend,
        refusal=refusal,
    )
    return Skipping(cache, handle, total_steps=total_steps, spare_core=spare_cores(loader) >= 1)


def _follow(loader: Any, id_column: str | None, recorder: Recorder) -> tuple[SampleFeed | None, str]:
    """Return what knows the samples of batches, or None and why there is nothing."""
    try:
        return SampleFeed(loader, id_column=id_column, base_seed=BASE_SEED), ""
    except NoSamplesError as error:
        recorder.decline("storing activations", str(error))
        return None, str(error)


def _directory(config: Config, recorder: Recorder) -> CacheDirectory:
    settings = config.cache
    run = recorder.journal.directory
    path = Path(settings.directory) if settings.directory else (run or Path()) / SUBDIRECTORY
    return CacheDirectory(path, limit_bytes=settings.limit_bytes, limit_share=settings.limit_share)
