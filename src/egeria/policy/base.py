"""What policies share: the frozen prefix, and the critical period before which nothing freezes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from egeria.config import Config
from egeria.policy.protocol import (
    BOOTSTRAPPING,
    KNOWLEDGE_GUIDED,
    PLASTICITY,
    Decision,
    EndBootstrapping,
    Freeze,
    Interval,
    Judgement,
    Reading,
    Thaw,
)
from egeria.policy.schedules import UnfreezeRule


class FrontPolicy:
    """A policy that freezes from the front, to build others on. By itself it is 'none': the plain
    run.
    """

    needs: frozenset[str] = frozenset()
    has_bootstrapping = False  # whether a run begins in the bootstrapping stage
    _saved: tuple[str, ...] = ("frozen", "trainable", "deepest_freeze")
    """Private attributes that make the state, without the underscore."""

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
        self._deepest_freeze = last if deepest_freeze is None else min(deepest_freeze, last)
        self._frozen = 0
        self._window = config.plasticity.window
        self._prepare()

    def _prepare(self) -> None:
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
        """`W` as it stands now, in evaluations."""
        return self._window

    @property
    def monitored(self) -> int | None:
        """The layer module whose plasticity is wanted, or None."""
        return self._candidate if PLASTICITY in self.needs else None

    @property
    def _candidate(self) -> int | None:
        """The next to freeze, of the policies that judge one after the other."""
        return None

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Return the decisions at the end of an interval: here none."""
        return ()

    def observe_reading(self, reading: Reading) -> Judgement:
        """Return the reading as it is: it decides nothing."""
        return Judgement(smoothed=reading.value)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values."""
        return {name: _plain(getattr(self, f"_{name}")) for name in self._saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        for name in self._saved:
            setattr(self, f"_{name}", _restored(state[name], getattr(self, f"_{name}")))

    def _move_to(self, depth: int, reason: str) -> tuple[Decision, ...]:
        """Return the decisions that make the first `depth` layer modules the frozen ones, as far as
        allowed.
        """
        depth, before = min(depth, self._deepest_freeze), self._frozen
        if not self._config.freezing.enabled or depth == before:
            return ()
        self._frozen = depth
        if depth > before:
            return tuple(Freeze(module=module, reason=reason) for module in range(before, depth))
        thaw = Thaw(reason=reason, window=self.window)
        return (thaw, *(Freeze(module=module, reason=reason) for module in range(depth)))

    def _pass_over_untrainable(self) -> tuple[Decision, ...]:
        """Return the decisions that freeze the next modules as far as they have no parameters to
        train.
        """
        depth = self._frozen
        while depth < self._deepest_freeze and not self._trainable[depth]:
            depth += 1
        return self._move_to(depth, "it has no parameters to train")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bootstrap:
    """The early, critical period: over once the mean loss changes little from interval to interval
    (paper §3).
    """

    change_threshold: float
    previous_loss: float | None = None
    change: float | None = (
        None  # relative change of the loss in the last interval; None before the second one
    )

    @property
    def is_over(self) -> bool:
        """Whether the loss of an interval has come to less than `change_threshold` from the one
        before.
        """
        return self.change is not None and self.change < self.change_threshold

    def observe(self, loss: float | None) -> Bootstrap:
        """Return the next state; an interval without a finite loss changes nothing."""
        if loss is None:
            return self
        change = None if self.previous_loss is None else relative_change(self.previous_loss, loss)
        return replace(self, previous_loss=loss, change=change)


class BootstrappedPolicy(FrontPolicy):
    """A policy whose run begins with the bootstrapping stage."""

    has_bootstrapping = True
    _saved = (*FrontPolicy._saved, "bootstrap")

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
        ended = EndBootstrapping(
            reason=f"the loss changed by {change:.1%} in an interval, less than {threshold:.0%}"
        )
        return (ended, *self._pass_over_untrainable())


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(map(_plain, value))
    if not is_dataclass(value):
        return value
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _restored(value: Any, present: Any) -> Any:
    """Return what `_plain` made a value of, by the value that the attribute has now; lists count as
    tuples.
    """
    if is_dataclass(present) and not isinstance(present, type):
        return replace(
            present,
            **{name: _restored(entry, getattr(present, name)) for name, entry in value.items()},
        )
    if isinstance(value, (list, tuple)):
        entry_now = present[0] if isinstance(present, tuple) and present else None
        return tuple(_restored(entry, entry_now) for entry in value)
    return value


def relative_change(before: float | None, now: float | None) -> float:
    """Return the change as a share of what was before; not a number where one of the two is missing
    or not finite.
    """
    if before is None or now is None or not (math.isfinite(before) and math.isfinite(now)):
        return math.nan
    if before == now:
        return 0.0
    return abs(before - now) / abs(before) if before else math.inf
