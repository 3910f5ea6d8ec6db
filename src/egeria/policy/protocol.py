"""The interface between a policy and the session: what it is given, what it returns, and the policy
itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from egeria.config import Config
from egeria.events import IntervalMeasured
from egeria.policy.schedules import UnfreezeRule

BOOTSTRAPPING = "bootstrapping"
KNOWLEDGE_GUIDED = "knowledge-guided"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """What was measured over `n` steps of training."""

    step: int
    evaluation: int
    loss: float | None
    """Mean of the finite training losses; None where there was none."""
    learning_rate: float
    frozen: int | None = None
    """How many front layer modules were frozen; None where it is not known."""

    @classmethod
    def of(cls, event: IntervalMeasured) -> Interval:
        """Return what the journal has of it."""
        return cls(**{field.name: getattr(event, field.name) for field in fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Plasticity of one layer module at one evaluation; finite."""

    step: int
    evaluation: int
    module: int
    value: float
    age: int | None = None
    """Evaluations since the snapshot that it was compared with."""
    wall_s: float = 0.0
    """Seconds the reading took in the training process: for the journal, no policy may decide by
    it."""
    cpu_s: float = 0.0
    """CPU seconds it took in the training process, likewise."""
    controller_cpu_s: float = 0.0
    """CPU seconds it took in the controller process, likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndBootstrapping:
    """The critical period is over: layer modules may freeze."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Freeze:
    """Freeze this layer module, the frontmost active one."""

    module: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Thaw:
    """Thaw everything and start again at the first layer module, with this window."""

    reason: str
    window: int


Decision = EndBootstrapping | Freeze | Thaw


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a policy concluded from one reading."""

    smoothed: float
    slope: float | None = None
    tolerance: float | None = None
    stationary: int = 0
    """Consecutive stationary evaluations, this one included."""
    decisions: tuple[Decision, ...] = ()


PLASTICITY = "plasticity"


@runtime_checkable
class Policy(Protocol):
    """Decides what is frozen. The caller must apply every decision it returns, in order.

    It must decide by what it observes alone, so that a run can be resumed and replayed.
    """

    @property
    def needs(self) -> frozenset[str]:
        """What must be measured for it.

        'plasticity' are readings of the `monitored` layer module, through `observe_reading`.
        """

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen."""

    @property
    def stage(self) -> str:
        """Either 'bootstrapping' or 'knowledge-guided'."""

    @property
    def window(self) -> int:
        """`W` as it stands now, in evaluations."""

    @property
    def monitored(self) -> int | None:
        """The layer module whose plasticity is wanted; None while none is."""

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Return the decisions after one interval."""

    def observe_reading(self, reading: Reading) -> Judgement:
        """Return the judgement of one reading; a reading of a module no longer monitored changes
        nothing.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""


@runtime_checkable
class Foreseeing(Protocol):
    """A policy that knows for how long the frozen prefix stays as it is, by which the cache decides
    whether it pays.
    """

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return for how many steps after `step` the boundary cannot move; None: to the end of the
        run.
        """


class PolicyMaker(Protocol):
    """Makes the policy of a run, and another one where the model is cut into
    other layer modules.
    """

    def __call__(
        self,
        config: Config,
        *,
        trainable: Sequence[bool],
        rule: UnfreezeRule,
        total_steps: int | None,
        deepest_freeze: int | None,
    ) -> Policy:
        """Return a new policy.

        Args:
            config: the settings of the run.
            trainable: for each layer module, front to back, whether it has any parameter to train.
            rule: when the learning rate asks for a thaw.
            total_steps: optimizer steps of the run, None where unknown.
            deepest_freeze: at most this many front modules may freeze; None for all but the last.
        """
