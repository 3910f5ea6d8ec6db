"""Keeping the processes of a job in step: all see the same numbers, so that all decide alike."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from enum import IntEnum

from egeria.parallel import ParallelStrategy
from egeria.policy import Reading

ROW = 64
"""Numbers that are exchanged at once."""
HEAD = 3
"""Numbers of a row in front of what it says: the subject, the step, and how many follow."""
SHARED = ("step", "evaluation", "module", "value", "age", "work_share")
"""What is exchanged of a reading: all that a policy may decide by."""


class Subject(IntEnum):
    """What an exchange is about."""

    LEAVING = 0
    ATTACHING = 1
    INTERVAL = 2
    MEASURES = 3
    READINGS = 4
    GATE = 5
    CLOSING = 6
    REFRESH = 7


class OutOfStepError(Exception):
    """The processes do not agree, or one of them cannot continue: all of them learn it in the same exchange."""


class LostError(Exception):
    """The processes cannot reach each other any more: nothing about what is frozen may change."""


class Ranks:
    """The processes of a job, seen from one of them.

    They meet at the end of each interval, and in between where a controller process may have readings. A meeting
    is a fixed sequence of exchanges that ends with `close`. One that fails between two of them says so in the
    next, whichever that is, since all rows have the same length; one that fails outside says so in the next meeting.
    No process is then left waiting for another, and all stop freezing at the same step: every exchange raises
    `OutOfStepError` where one of them leaves or is at something else, `LostError` where they cannot reach each other.

    Args:
        parallel: how they train together.
    """

    def __init__(self, parallel: ParallelStrategy) -> None:
        self._parallel = parallel
        self._step = 0
        self.meets = False
        """Whether a meeting is under way."""
        self._leaves = False
        self._has_parted = False
        self.leader_is_apart = False
        """Whether the leader's controller is a separate process, whose readings come whenever they are ready."""
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
    def rank(self) -> int:
        """Which of the processes this is."""
        return self._parallel.rank

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
        """Report to the others that this process cannot continue: now, if they meet, else at the next meeting."""
        self._leaves = True
        if self.are_meeting:
            self.gather(Subject.LEAVING, ())

    def gather(self, subject: Subject, values: Sequence[float]) -> list[list[float]]:
        """Return the values of all processes, by rank."""
        if self.is_alone:
            return [list(values)]
        rows = self._exchange(Subject.LEAVING if self._leaves else subject, values)
        leaving = [rank for rank, found in enumerate(rows) if found[0] == Subject.LEAVING]
        apart = [rank for rank, found in enumerate(rows) if found[:HEAD] != rows[0][:HEAD]]
        if leaving or apart:
            self.meets = False
            raise OutOfStepError(_why(leaving, apart))
        return [found[HEAD : HEAD + len(values)] for found in rows]

    def from_leader(self, subject: Subject, values: Sequence[float]) -> list[float]:
        """Return the leader's values in place of one's own; there must be as many."""
        return [value for rows in self._gather_all(subject, values) for value in rows[0]]

    def text_from_leader(self, subject: Subject, text: str) -> str:
        """Return the leader's text in place of one's own."""
        encoded = text.encode()
        [size] = self.from_leader(subject, [float(len(encoded))])
        own = [float(byte) for byte in encoded] if self.leads else [0.0] * int(size)
        return bytes(map(int, self.from_leader(subject, own))).decode()

    def sums(self, subject: Subject, values: Sequence[float]) -> list[float]:
        """Return the sums of what all processes have; each must have as many."""
        return [sum(column) for rows in self._gather_all(subject, values) for column in zip(*rows, strict=True)]

    def mean_loss(self, cut: float, loss: float | None, num_bad: int) -> tuple[float | None, int]:
        """Return the mean training loss of all processes that have one, and how many losses were none."""
        rows = self.gather(Subject.INTERVAL, (cut, math.nan if loss is None else loss, num_bad))
        self._check_same(rows)
        losses = [found for _, found, _ in rows if not math.isnan(found)]
        return (statistics.fmean(losses) if losses else None), int(sum(bad for _, _, bad in rows))

    def readings(self, own: Sequence[Reading]) -> list[Reading]:
        """Return the readings that the leader has."""
        [count] = self.from_leader(Subject.READINGS, [float(len(own))])
        fields = [getattr(reading, name) for reading in own for name in SHARED]
        numbers = list(map(to_number, fields)) if self.leads else []
        width = len(SHARED)
        shared = self.from_leader(Subject.READINGS, numbers or [0.0] * (width * int(count)))
        return [_to_reading(shared[begin : begin + width]) for begin in range(0, len(shared), width)]

    def close(self, state: str, interval_steps: int) -> int:
        """End a meeting, to which all come with the same `state` of what is frozen; return the leader's `n`."""
        rows = self.gather(Subject.CLOSING, (fingerprint(state), interval_steps))
        self._check_same(rows)
        self.meets = False
        return int(rows[0][1])

    def _exchange(self, subject: Subject, values: Sequence[float]) -> list[list[float]]:
        row = [float(subject), float(self._step), float(len(values)), *values]
        assert len(row) <= ROW, "what is longer goes in parts"
        try:
            self._parallel.settle()
            return self._parallel.exchange([*row, *[0.0] * (ROW - len(row))])
        except Exception as error:
            self.meets, self.is_lost = False, True
            raise LostError(f"the processes of the job could not reach each other ({error})") from error

    def _gather_all(self, subject: Subject, values: Sequence[float]) -> list[list[list[float]]]:
        """Return the values of all processes, however many: in parts, and in each by rank."""
        size = ROW - HEAD
        return [self.gather(subject, values[begin : begin + size]) for begin in range(0, len(values), size)]

    def _check_same(self, rows: Sequence[Sequence[float]]) -> None:
        """Check that all say the same in the first place."""
        apart = [rank for rank, row in enumerate(rows) if row[0] != rows[0][0]]
        if apart:
            self.meets = False
            raise OutOfStepError(_why((), apart))


def to_number(value: float | None) -> float:
    """Return a number for what may be none."""
    return math.nan if value is None else float(value)


def from_number(value: float) -> float | None:
    """Return what `to_number` was given."""
    return None if math.isnan(value) else value


def _to_reading(numbers: Sequence[float]) -> Reading:
    step, evaluation, module = map(int, numbers[:3])
    age = None if math.isnan(numbers[4]) else int(numbers[4])
    work_share = from_number(numbers[5])
    return Reading(step=step, evaluation=evaluation, module=module, value=numbers[3], age=age, work_share=work_share)


def fingerprint(text: str) -> float:
    """Return a whole number that stands for a text and that a float holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little"))


def _why(leaving: Sequence[int], apart: Sequence[int]) -> str:
    if leaving:
        return f"rank {', '.join(map(str, leaving))} cannot go on; its own output says why"
    return f"rank {', '.join(map(str, apart))} does not have what rank 0 has: other layer modules, steps or decisions"
