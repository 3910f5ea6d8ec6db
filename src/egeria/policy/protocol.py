"""The interface between a policy and the session: what it is given, what it returns, and the policy
itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

from egeria.config import Config
from egeria.config.checks import PERIODS, require
from egeria.events import IntervalMeasured
from egeria.policy.schedules import UnfreezeRule

BOOTSTRAPPING = "bootstrapping"
KNOWLEDGE_GUIDED = "knowledge-guided"
_IN_JOURNAL = {"remaining_rate_sum": "way_ahead"}
"""What has another name there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """What was measured over `n` steps of training; what the policy does not need is None.

    In what is measured by layer module, a frozen one has None.
    """

    step: int
    evaluation: int
    loss: float | None
    """Mean of the finite training losses; None where there was none."""
    learning_rate: float
    gradients: tuple[float | None, ...] | None = None
    """For each layer module the L1 norm of its gradients, summed over the interval."""
    weight_changes: tuple[float | None, ...] | None = None
    """For each layer module ||w_now - w_then|| / ||w_then|| over the interval; None in the first
    one."""
    noise: tuple[float | None, ...] | None = None
    """For each layer module by how much the noise of the optimizer's steps raises the loss."""
    remaining_rate_sum: float | None = None
    """Sum of the learning rate over the steps still to come; None where it is unknown."""
    last_rate: float | None = None
    """The learning rate of the last step; None like `remaining_rate_sum`."""
    worth: tuple[float | None, ...] | None = None
    """For each layer module by how much its steps in the interval lowered the loss, to first
    order."""
    time_shares: tuple[float, ...] | None = None
    """For each layer module the share of an iteration that a freeze of it saves, where all in front
    are frozen."""
    num_pretrained: int | None = None
    """How many front layer modules came trained; None like `worth`."""
    freeze_scores: tuple[float | None, ...] | None = None
    """For each layer module the probability that it may freeze, as the predictor of SmartFRZ sees
    it."""
    frozen: int | None = None
    """How many front layer modules were frozen, those not that land first or wait; None where it is
    not known."""

    @classmethod
    def of(cls, event: IntervalMeasured) -> Interval:
        """Return what the journal has of it."""
        found = {
            field.name: getattr(event, _IN_JOURNAL.get(field.name, field.name))
            for field in fields(cls)
        }
        values: Any = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.items()
        }
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Plasticity of one layer module at one evaluation; finite."""

    step: int
    evaluation: int
    module: int
    value: float
    age: int | None = None
    """Evaluations since the snapshot that it was compared with; None where that is not known."""
    work_share: float | None = None
    """Share of the model's forward operations that the module makes; None where they could not be
    counted."""
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
    """Freeze this layer module, the frontmost active one.

    With `freezing.landing` it lands first. To the policy it is frozen from now on; a `Thaw` cancels
    that.
    """

    module: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Thaw:
    """Thaw everything and start again at the first layer module, with this window; all periods are
    1 again.
    """

    reason: str
    window: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SetPeriods:
    """Update front layer modules at some optimizer steps only, from the next step on.

    A module is updated at the steps whose number, counted from 1, is divisible by its period.
    """

    periods: tuple[int, ...]
    """For each layer module, front to back; 1 is every step. Those of frozen modules mean nothing
    while they are."""
    reason: str

    def __post_init__(self) -> None:
        """Raise ConfigError for periods by which what rests at a step would not always be a front
        of the model.
        """
        periods = self.periods
        is_usable = all(period in (1, *PERIODS) for period in periods) and periods[-1:] == (1,)
        falls = all(front >= behind for front, behind in itertools.pairwise(periods))
        contract = (
            f"1 or one of {', '.join(map(str, PERIODS))}, never smaller in front than "
            "behind, and 1 at the end"
        )
        require(is_usable and falls, "SetPeriods.periods", contract, periods)


Decision = EndBootstrapping | Freeze | Thaw | SetPeriods


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a policy concluded from one reading."""

    smoothed: float
    slope: float | None = None
    tolerance: float | None = None
    stationary: int = 0
    """Consecutive stationary evaluations, this one included."""
    change_ahead: float | None = None
    """Plasticity against now that the module is predicted to reach by the end of the run, where the
    policy predicts."""
    loss_ahead: float | None = None
    """Share of the fall of the training loss so far that freezing would keep it up by."""
    decisions: tuple[Decision, ...] = ()


PLASTICITY = "plasticity"
GRADIENTS = "gradients"
WEIGHTS = "weights"
NOISE = "noise"
WORTH = "worth"
FORESIGHT = "foresight"
PREDICTION = "prediction"


@runtime_checkable
class Policy(Protocol):
    """Decides what is frozen. The caller must apply every decision it returns, in order.

    It must decide by what it observes alone, so that a run can be resumed and replayed.
    """

    @property
    def needs(self) -> frozenset[str]:
        """What must be measured for it.

        'plasticity' are readings of the `monitored` layer module, through `observe_reading`.
        'gradients', 'weights', 'noise', 'foresight' (`remaining_rate_sum` and `last_rate`),
        'prediction' (`freeze_scores`) and 'worth' (with `time_shares` and `num_pretrained`; of a
        model that begins untrained there is none) are fields of `Interval`. What a policy does not
        need from the beginning on it cannot need later; what it needs no more is not measured any
        more.
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
class Annealing(Protocol):
    """A policy that also sets the learning rate of each layer module."""

    def rate_shares(self, step: int) -> tuple[float, ...] | None:
        """Return the learning rate of each layer module for the step after `step`.

        It is a share of the optimizer's initial one; None leaves all rates to the optimizer.
        """


@runtime_checkable
class Foreseeing(Protocol):
    """A policy that knows for how long the frozen prefix stays as it is, by which the cache decides
    whether it pays.
    """

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return for how many steps after `step` the boundary cannot move; None: to the end of the
        run.
        """


@runtime_checkable
class Unhurried(Protocol):
    """A policy that at times is content with longer intervals than it began with."""

    @property
    def least_interval_steps(self) -> int:
        """Steps that an interval may have at least, from now on; 0 leaves it as it is."""


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
