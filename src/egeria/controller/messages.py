"""What the training process and the controller tell each other over the pipe: all small, all picklable."""

from __future__ import annotations

from dataclasses import dataclass

from egeria.controller.protocol import Report, Ticket
from egeria.controller.queues import Place

# --- to the controller -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakeModel:
    """The model as it is built, and the plan of the assessor, lie in the model queue."""

    place: Place
    precision: str
    """The rung to begin with."""


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """New weights, and a batch to calibrate on, lie in the snapshot queue."""

    evaluation: int
    place: Place


@dataclass(frozen=True, slots=True)
class TakeInput:
    """A batch lies in IQ; the reference is to run it up to the ticket's tap, for the first rows."""

    ticket: Ticket
    place: Place
    num_rows: int
    as_gram: bool


@dataclass(frozen=True, slots=True)
class TakeOutput:
    """The training model's output for the evaluation lies in TOQ."""

    evaluation: int
    place: Place


ToController = TakeModel | TakeSnapshot | TakeInput | TakeOutput

# --- to the training process -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The controller has imported what it needs."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The controller computes, or waits for the machine to have room."""


@dataclass(frozen=True, slots=True)
class Emptied:
    """A place in a queue is free again."""

    queue: str
    slot: int


@dataclass(frozen=True, slots=True)
class Unusable:
    """The model cannot be rebuilt in the controller process."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reports:
    """What happened; `cpu_s` is the CPU time of the controller process so far."""

    reports: tuple[Report, ...]
    cpu_s: float


FromController = Ready | Alive | Emptied | Unusable | Reports
