"""The interface between a policy and the session: what a policy needs, what it is given, what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from egeria.config import Config
from egeria.policy.schedules import UnfreezeRule
from egeria.policy.values import Decision, Interval, Judgement, Reading

PLASTICITY = "plasticity"
"""Readings of the `monitored` layer module against the reference model, through `observe_reading`."""
GRADIENTS = "gradients"
"""`Interval.gradients`."""
WEIGHTS = "weights"
"""`Interval.weight_changes`."""
NOISE = "noise"
"""`Interval.noise`."""
FORESIGHT = "foresight"
"""`Interval.remaining_rate_sum` and `last_rate`."""


@runtime_checkable
class Policy(Protocol):
    """Decides what is frozen. The caller must apply every decision it returns, in order.

    It must decide by what it observes alone, so that a run can be resumed and replayed.
    """

    @property
    def needs(self) -> frozenset[str]:
        """What must be measured for it: 'plasticity', 'gradients', 'weights', 'noise', 'foresight'."""
        ...

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen."""
        ...

    @property
    def stage(self) -> str:
        """Either 'bootstrapping' or 'knowledge-guided'."""
        ...

    @property
    def window(self) -> int:
        """`W` as it stands now, in evaluations."""
        ...

    @property
    def monitored(self) -> int | None:
        """The layer module whose plasticity is wanted; None while none is."""
        ...

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Return the decisions after one interval."""
        ...

    def observe_reading(self, reading: Reading) -> Judgement:
        """Return the judgement of one reading; a reading of a module no longer monitored changes nothing."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        ...


@runtime_checkable
class Annealing(Protocol):
    """A policy that also sets the learning rate of each layer module."""

    def rate_shares(self, step: int) -> tuple[float, ...] | None:
        """Return the learning rate of each layer module for the step after `step`.

        It is a share of the optimizer's initial one; None leaves all rates to the optimizer.
        """
        ...


@runtime_checkable
class Foreseeing(Protocol):
    """A policy that knows for how long the frozen prefix stays as it is, by which the cache decides whether it pays."""

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return for how many steps the boundary cannot move; None: to the end of the run.

        Args:
            step: optimizer steps done.
            interval_steps: `n`.
        """
        ...


class PolicyMaker(Protocol):
    """Makes the policy of a run, and another one where the model is cut into other layer modules."""

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
        ...
