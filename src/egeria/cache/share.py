"""With whom a process shares stored activations: one process of a host makes the stores, the others join them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from egeria.cache.samples.feed import SampleFeed
from egeria.cache.store.directory import CacheDirectory
from egeria.cache.store.rows import StoreError

BOUNDARY = 100
"""Numbers of generations from one boundary to the next, where processes share them."""
PATIENCE = 200
"""Forwards after which a process decides by itself that the one that leads has stored nothing."""


class Share:
    """The processes of a host that train one model, seen from one of them. Nobody ever waits for another.

    Args:
        is_alone: whether there is nobody to share with.
        leads: whether this process decides and makes the stores, and others join them.
    """

    def __init__(self, *, is_alone: bool = True, leads: bool = True) -> None:
        self.is_alone = is_alone
        self.leads = leads
        self._num_asked = 0

    def number_at(self, number: int) -> int:
        """Return the number of the newest generation, now that the boundary has moved.

        It moves in all processes alike; further decisions behind one boundary may not be made by all.
        """
        self._num_asked = 0
        return number if self.is_alone else number + BOUNDARY - number % BOUNDARY

    def refusal(self, feed: SampleFeed | None) -> str:
        """Return why nothing can be shared; empty where it can."""
        if self.is_alone or feed is None or not feed.numbers_by_sight:
            return ""
        return "samples are told by a column of the batch, and each process numbers them for itself"

    def decide(
        self,
        place: Callable[[], CacheDirectory],
        number: int,
        decide: Callable[[], None],
        is_opened: Callable[[], bool],
    ) -> None:
        """Decide how a generation is done, where that is this process' to say or has been said; else later.

        Args:
            place: returns where stores go.
            number: of the generation.
            decide: decides.
            is_opened: tells whether the generation is stored then; the others hear of that. Where it cannot be
                written down, they give up.

        Raises:
            Exception: whatever deciding raises.
        """
        if not self.leads:
            self._num_asked += 1
            if place().published(number) is None and self._num_asked <= PATIENCE:
                return
        self._num_asked = 0
        try:
            decide()
        finally:
            if self.leads and not self.is_alone:
                with contextlib.suppress(StoreError):
                    place().publish(number, opened=is_opened())
