"""The interface of policies: numbers in, a depth out. No torch, threads, clocks or files here."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

BOOTSTRAPPING = "bootstrapping"
KNOWLEDGE_GUIDED = "knowledge-guided"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Plasticity of one layer module, measured at one evaluation; finite."""

    evaluation: int
    module: int
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """What a policy is asked with.

    It is asked at the end of an interval, and in between (`num_steps` is 0) at step 0, after one of
    `Wants.steps`, and when readings have arrived.
    """

    step: int  # optimizer steps made; 0 in the question before the first one
    frozen: int = 0  # how many front layer modules are frozen now
    num_steps: int = 0  # optimizer steps of the interval that has just ended
    loss: float | None = None  # mean of its finite losses; None where there was none
    learning_rate: float = 0.0
    readings: tuple[Reading, ...] = ()  # since the last question, oldest first
    seconds: float = 0.0  # median wall-clock time of an iteration


@dataclass(frozen=True, slots=True)
class Depth:
    """A decision: how many front layer modules are frozen from now on, and why."""

    frozen: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Wants:
    """When a policy is asked, beside the question at step 0, and what is measured for it."""

    plasticity_of: int | None = None  # the layer module that is evaluated after each interval
    refresh: bool = False  # whether the reference model is refreshed at the end of this interval
    interval_steps: int | None = None  # optimizer steps of an interval; None: the run chooses
    steps: tuple[int, ...] = ()  # optimizer steps after which the policy is asked as well

    def next_step(self, step: int) -> float:
        """Return the smallest of `steps` above `step`; infinity where there is none."""
        return min((entry for entry in self.steps if entry > step), default=math.inf)


@dataclass(frozen=True, slots=True)
class Status:
    """For the journal: the attribute `status` of a policy, if it has one."""

    stage: str  # such as 'bootstrapping'
    reason: str = ""  # why the stage began
    window: int = 0  # `W` as it is now, in evaluations
    smoothed: float | None = None  # the newest reading, smoothed; None where none was wanted
    slope: float | None = None
    tolerance: float | None = None
    stationary: int = 0  # how many evaluations in a row were stationary


@runtime_checkable
class Policy(Protocol):
    """Decides how many front layer modules are frozen, by what it is asked with alone.

    So a run can be resumed. A depth may be refused: `Interval.frozen` says what is frozen.
    """

    @property
    def wants(self) -> Wants:
        """When it is asked, and what is measured for it, from now on."""

    def observe(self, interval: Interval) -> Depth | None:
        """Return the depth from now on; None to leave it as it is."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


# Makes the policy of a run once its layer modules are known. It is called with keywords only:
# `modules`, a tuple of their names, front to back; `trainable`, for each whether it has parameters
# to train; `deepest`, how many of them may be frozen at most; `total_steps`, the optimizer steps of
# the run, None where unknown; `lr_rule`, an `UnfreezeRule`, which knows the learning rate.
Maker = Callable[..., Policy]
