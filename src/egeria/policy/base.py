"""What policies share: the frozen prefix, and the critical period before which nothing freezes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, ClassVar

from egeria.config import Config
from egeria.policy.protocol import (
    BOOTSTRAPPING,
    KNOWLEDGE_GUIDED,
    Decision,
    EndBootstrapping,
    Freeze,
    Interval,
    Judgement,
    Reading,
    Thaw,
)
from egeria.policy.schedules import UnfreezeRule


class FrontPolicy(ABC):
    """A policy that freezes from the front; without bootstrapping, plasticity or thaw rules, to build others on.

    Args:
        config: the settings of the run.
        trainable: for each layer module, front to back, whether it has any parameter to train.
        rule: when the learning rate asks for a thaw.
        total_steps: optimizer steps of the run, None where unknown.
        deepest_freeze: at most this many front modules freeze; the last one never does.
    """

    needs: frozenset[str] = frozenset()
    has_bootstrapping = False
    """Whether a run begins in the bootstrapping stage."""
    _saved: ClassVar[Mapping[str, str]] = {
        "frozen": "_frozen",
        "trainable": "_trainable",
        "deepest_freeze": "_deepest",
    }
    """Attributes that make the state, by their keys in it."""

    def __init__(
        self,
        config: Config,
        *,
        trainable: Sequence[bool],
        rule: UnfreezeRule,
        total_steps: int | None = None,
        deepest_freeze: int | None = None,
    ) -> None:
        self._config = config
        self._trainable = tuple(trainable)
        self._rule = rule
        self._total_steps = total_steps
        last = len(self._trainable) - 1
        self._deepest = last if deepest_freeze is None else min(deepest_freeze, last)
        self._frozen = 0
        self._prepare()

    def _prepare(self) -> None:  # noqa: B027 (most policies keep nothing more)
        """Set up what a policy keeps beyond the frozen prefix; called once, by the constructor."""

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen."""
        return self._frozen

    @property
    def stage(self) -> str:
        """Either 'bootstrapping' or 'knowledge-guided'."""
        return KNOWLEDGE_GUIDED

    @property
    def window(self) -> int:
        """`W`, in evaluations."""
        return self._config.plasticity.window

    @property
    def monitored(self) -> int | None:
        """The layer module whose plasticity is wanted, or None."""
        return None

    @abstractmethod
    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Decide at the end of an interval."""

    def observe_reading(self, reading: Reading) -> Judgement:
        """Return the reading as it is: it decides nothing."""
        return Judgement(smoothed=reading.value)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values."""
        return {key: _plain(getattr(self, name)) for key, name in self._saved.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        for key, name in self._saved.items():
            setattr(self, name, _restored(state[key], getattr(self, name)))

    def _move_to(self, depth: int, reason: str) -> tuple[Decision, ...]:
        """Return the decisions that make the first `depth` layer modules the frozen ones, as far as allowed."""
        depth = min(depth, self._deepest)
        decisions: list[Decision] = []
        if not self._config.freezing.enabled or depth == self._frozen:
            return ()
        if depth < self._frozen:
            decisions.append(Thaw(reason=reason, window=self.window))
            self._frozen = 0
        decisions += (Freeze(module=module, reason=reason) for module in range(self._frozen, depth))
        self._frozen = depth
        return tuple(decisions)

    def _pass_over_untrainable(self) -> tuple[Decision, ...]:
        """Return the decisions that freeze the next modules as far as they have no parameters to train."""
        depth = self._frozen
        while depth < self._deepest and not self._trainable[depth]:
            depth += 1
        return self._move_to(depth, "it has no parameters to train")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bootstrap:
    """The mean loss of successive intervals in the early, critical period, in which nothing may freeze (paper §3).

    Left when the loss of an interval differs by less than `change_threshold` from the one before.
    """

    change_threshold: float
    previous_loss: float | None = None
    change: float | None = None
    """Relative change of the loss at the last interval; None before the second one."""

    @property
    def is_over(self) -> bool:
        """Whether the critical period has passed."""
        return self.change is not None and self.change < self.change_threshold

    def observe(self, loss: float | None) -> Bootstrap:
        """Return the next state; an interval without a finite loss changes nothing."""
        if loss is None:
            return self
        if self.previous_loss is None:
            return replace(self, previous_loss=loss)
        return replace(self, previous_loss=loss, change=_relative_change(self.previous_loss, loss))


class BootstrappedPolicy(FrontPolicy):
    """A policy whose run begins with the bootstrapping stage."""

    has_bootstrapping = True
    _saved: ClassVar[Mapping[str, str]] = {**FrontPolicy._saved, "bootstrap": "_bootstrap"}

    def _prepare(self) -> None:
        self._bootstrap = Bootstrap(change_threshold=self._config.bootstrapping.change_threshold)

    @property
    def stage(self) -> str:
        """Either 'bootstrapping' or 'knowledge-guided'."""
        return KNOWLEDGE_GUIDED if self._bootstrap.is_over else BOOTSTRAPPING

    def _observe_bootstrapping(self, loss: float | None) -> tuple[Decision, ...]:
        """Return the decisions that end the stage where the loss of an interval does, else none."""
        self._bootstrap = self._bootstrap.observe(loss)
        if not self._bootstrap.is_over:
            return ()
        change, threshold = self._bootstrap.change, self._bootstrap.change_threshold
        ended = EndBootstrapping(reason=f"the loss changed by {change:.1%} in an interval, less than {threshold:.0%}")
        return (ended, *self._pass_over_untrainable())


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def _restored(value: Any, present: Any) -> Any:
    """Return what `_plain` made a value of, by the value that the attribute has now; lists count as tuples."""
    if is_dataclass(present) and not isinstance(present, type):
        return type(present)(**{name: _restored(entry, None) for name, entry in value.items()})
    if isinstance(value, (list, tuple)):
        entry_now = present[0] if isinstance(present, tuple) and present else None
        return tuple(_restored(entry, entry_now) for entry in value)
    return value


def _relative_change(before: float, after: float) -> float:
    if before == after:
        return 0.0
    return abs(before - after) / abs(before) if before else float("inf")
