"""What the training thread does for a batch from the cache, in CPU milliseconds of that thread."""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

WHOLE = "whole forward, the user's included"
PARTS = {
    WHOLE: "egeria.session.following:ModelHandle.forward",
    "of it: the user's forward": "egeria.cache.forward_modes:UserForward.__call__",
    "description of the batch": "egeria.layers.batch:Batch.of_call",
    "noting what can be undone": "egeria.cache.forward_modes:Rollback.save",
    "fingerprints": "egeria.cache.layout:fingerprints",
    "true lengths": "egeria.cache.layout:true_lengths",
    "take": "egeria.cache.prefetch.fetcher:Fetcher.take",
    "ahead": "egeria.cache.prefetch.fetcher:Fetcher.ahead",
    "upcoming samples": "egeria.cache.loader:SampleFeed.upcoming",
    "judging what is held": "egeria.cache.generation:Generation._judge",
    "may be replayed": "egeria.cache.generation:Generation._can_replay",
    "weights unchanged": "egeria.cache.generation:Generation._check",
    "keeping the batch": "egeria.cache.prefetch.fetcher:Fetcher.keep",
    "copies for the model": "egeria.skipping.prefix:Prefix._in_place",
    "checked against computing": "egeria.cache.generation:Generation._check_rows",
}
"""None but the whole holds another. One that has been renamed since counts among the rest."""


class Profile:
    """Seconds of the calling thread by part, and calls of the whole."""

    def __init__(self) -> None:
        self.cpu_s = dict.fromkeys(PARTS, 0.0)
        self.num_batches = 0

    def milliseconds(self) -> dict[str, float]:
        """Return what a batch takes, by part; 'the rest' is what no part accounts for."""
        found = {name: 1e3 * seconds / max(1, self.num_batches) for name, seconds in self.cpu_s.items()}
        return {**found, "the rest": 2 * found[WHOLE] - sum(found.values())}


@contextmanager
def profiled() -> Iterator[Profile]:
    """Time the parts in the block; timing adds some microseconds to each."""
    profile = Profile()
    with ExitStack() as stack:
        for name, place in PARTS.items():
            owner_name, _, attribute = place.replace(":", ".").rpartition(".")
            owner = pkgutil.resolve_name(owner_name)
            if attribute in vars(owner):
                stack.enter_context(_timed(profile, name, owner, attribute))
        yield profile


def _timed(profile: Profile, name: str, owner: Any, attribute: str) -> AbstractContextManager[Any]:
    found = vars(owner)[attribute]
    function: Callable[..., Any] = getattr(found, "__func__", found)

    def run(*args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            profile.cpu_s[name] += time.thread_time() - begin
            profile.num_batches += name == WHOLE

    return mock.patch.object(owner, attribute, classmethod(run) if isinstance(found, classmethod) else run)
