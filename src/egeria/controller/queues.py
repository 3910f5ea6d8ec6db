"""The queues between the training process and the controller (paper §4.1.2): bounded, one producer, one consumer.

What is queued lies in shared memory, one segment for each place in the queue; where it lies travels
over the pipe. The producer never waits: a full queue refuses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from egeria.controller.memory import Segment
from egeria.controller.parcel import pack, unpack


@dataclass(frozen=True, slots=True)
class Place:
    """Where something lies: which segment of its queue, and how much of it."""

    slot: int
    size_bytes: int


class Producer:
    """The end of a queue that fills it.

    Args:
        length: how many things it holds.
    """

    def __init__(self, length: int) -> None:
        self.segments = [Segment() for _ in range(length)]
        self.free = set(range(length))

    def put(self, thing: Any, *, hollow: Collection[Tensor] = ()) -> Place | None:
        """Queue a thing, without the values of the `hollow` tensors; None if the queue is full.

        Raises:
            Exception: it cannot be packed; the queue is as before.
        """
        if not self.free:
            return None
        slot = min(self.free)
        place = Place(slot, pack(thing, self.segments[slot], hollow=hollow))
        self.free.discard(slot)
        return place

    def release(self, slot: int) -> None:
        """Take back a place that the consumer has emptied."""
        self.free.add(slot)

    def empty(self, *, but: int | None = None) -> None:
        """Take back every place, but for one: the consumer is gone."""
        self.free = set(range(len(self.segments))) - {but}

    def close(self) -> None:
        """Let go of the memory."""
        for segment in self.segments:
            segment.close()


class Consumer:
    """The end of a queue that empties it.

    Args:
        descriptors: of the producer's segments.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._segments = [Segment(descriptor) for descriptor in descriptors]

    def take(self, place: Place) -> Any:
        """Return what lies in a place; tell the producer afterwards that it is free."""
        return unpack(self._segments[place.slot], place.size_bytes)
