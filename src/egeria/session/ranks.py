"""Keeping the processes of a job in step: all see the same numbers, so that all decide alike."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from enum import IntEnum
from typing import Any

from egeria.parallel import ParallelStrategy
from egeria.policy import Reading

WORDS = 61
"""Words of text that are exchanged at once; in front of them stand the subject, the step, and the
bytes to come."""
WORD_BYTES = 6
"""A float holds a whole number of so many exactly."""


class Subject(IntEnum):
    """What an exchange is about."""

    LEAVING = 0
    ATTACHING = 1
    INTERVAL = 2
    RATE = 3
    READINGS = 4
    GATE = 5
    CLOSING = 6


class OutOfStepError(Exception):
    """The processes do not agree, or one of them cannot continue: all of them learn it in the same
    exchange.
    """


class LostError(Exception):
    """The processes cannot reach each other any more: nothing about what is frozen may change."""


class Ranks:
    """The processes of a job, seen from one of them.

    They meet at the end of each interval, and in between where a controller process may have
    readings. A meeting is a fixed sequence of exchanges that ends with `close`. One that fails
    between two of them says so in the next, whichever that is, since all rows have the same length;
    one that fails outside says so in the next meeting. No process is then left waiting for another,
    and all stop freezing at the same step: every exchange raises `OutOfStepError` where one of them
    leaves or is at something else, `LostError` where they cannot reach each other.

    Args:
        parallel: how they train together.
    """

    def __init__(self, parallel: ParallelStrategy) -> None:
        self._parallel = parallel
        self.rank = parallel.rank
        """Which of the processes this is."""
        self._step = 0
        self.meets = False
        """Whether a meeting is under way."""
        self._leaves = False
        self._has_parted = False
        self.leader_is_apart = False
        """Whether the leader's controller is a separate process, whose readings come whenever they
        are ready."""
        self.is_lost = False
        """Whether an exchange has failed; there are no more then."""

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with, or not any more."""
        return self._parallel.num_ranks == 1 or self._has_parted or self.is_lost

    @property
    def are_meeting(self) -> bool:
        """Return whether others wait for this process to take part in a meeting."""
        return self.meets and not self.is_alone

    @property
    def leads(self) -> bool:
        """Return whether this is the process that evaluates and keeps the journal."""
        return self.rank == 0

    def meet(self, step: int) -> None:
        """Begin a meeting."""
        self._step, self.meets = step, True

    def part(self) -> None:
        """Meet no more: nothing will freeze."""
        self.meets, self._has_parted = False, True

    def leave(self) -> None:
        """Report to the others that this process cannot continue: now, if they meet, else at the
        next meeting.
        """
        self._leaves = True
        if self.are_meeting:
            self.gather(Subject.LEAVING, ())

    def gather(self, subject: Subject, value: Any) -> list[Any]:
        """Return the values of all processes, by rank: each is what JSON can
        hold, tuples as lists.
        """
        if self.is_alone:
            return [value]
        text = json.dumps(value).encode()
        found, sizes = [b"" for _ in range(self._parallel.num_ranks)], [1.0]
        while max(sizes) > 0:
            rows = self._exchange(Subject.LEAVING if self._leaves else subject, text)
            leaving = [rank for rank, row in enumerate(rows) if row[0] == Subject.LEAVING]
            apart = [rank for rank, row in enumerate(rows) if row[:2] != rows[0][:2]]
            if leaving or apart:
                self.meets = False
                raise OutOfStepError(_why(leaving, apart))
            found = [
                part + _to_bytes(words) for part, (_, _, _, *words) in zip(found, rows, strict=True)
            ]
            text = text[WORDS * WORD_BYTES :]
            sizes = [row[2] - WORDS * WORD_BYTES for row in rows]
        return [json.loads(entry.rstrip(b"\0")) for entry in found]

    def from_leader(self, subject: Subject, value: Any) -> Any:
        """Return the leader's value in place of one's own."""
        return self.gather(subject, value if self.leads or self.is_alone else None)[0]

    def mean_loss(self, cut: str, loss: float | None, num_bad: int) -> tuple[float | None, int]:
        """Return the mean training loss of all processes that have one, and how many losses were
        none.
        """
        rows = self.gather(Subject.INTERVAL, (cut, loss, num_bad))
        self._check_same(rows)
        losses = [found for _, found, _ in rows if found is not None]
        return (statistics.fmean(losses) if losses else None), sum(bad for _, _, bad in rows)

    def readings(self, own: Sequence[Reading]) -> list[Reading]:
        """Return the readings that the leader has."""
        return [
            Reading(**entry)
            for entry in self.from_leader(Subject.READINGS, [asdict(reading) for reading in own])
        ]

    def close(self, state: str, interval_steps: int) -> int:
        """End a meeting, to which all come with the same `state` of what is frozen; return the
        leader's `n`.
        """
        rows = self.gather(Subject.CLOSING, (fingerprint(state), interval_steps))
        self._check_same(rows)
        self.meets = False
        return int(rows[0][1])

    def _exchange(self, subject: Subject, text: bytes) -> list[list[float]]:
        """Return what all processes say next of a text: one row of each, all of the same length."""
        words = [
            int.from_bytes(text[WORD_BYTES * at : WORD_BYTES * (at + 1)], "little")
            for at in range(WORDS)
        ]
        try:
            self._parallel.settle()
            return self._parallel.exchange(
                [float(number) for number in (subject, self._step, len(text), *words)]
            )
        except Exception as error:
            self.meets, self.is_lost = False, True
            raise LostError(
                f"the processes of the job could not reach each other ({error})"
            ) from error

    def _check_same(self, rows: Sequence[Sequence[Any]]) -> None:
        """Check that all say the same in the first place."""
        apart = [rank for rank, row in enumerate(rows) if row[0] != rows[0][0]]
        if apart:
            self.meets = False
            raise OutOfStepError(_why((), apart))


def _to_bytes(words: Sequence[float]) -> bytes:
    return b"".join(int(word).to_bytes(WORD_BYTES, "little") for word in words)


def fingerprint(text: str) -> str:
    """Return a short text that stands for a long one."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _why(leaving: Sequence[int], apart: Sequence[int]) -> str:
    if leaving:
        return f"rank {', '.join(map(str, leaving))} cannot go on; its own output says why"
    return (
        f"rank {', '.join(map(str, apart))} does not have what rank 0 has: other layer "
        "modules, steps or decisions"
    )
