"""Freezing by the clock: what the time-based rivals share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from egeria.config import Config
from egeria.errors import ConfigError
from egeria.policy.front import FrontPolicy
from egeria.policy.schedules import UnfreezeRule
from egeria.policy.values import Decision, Interval

ROUNDING = 1e-9
"""Shares are sums in floating point: the smallest error must not put a move off by an interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """From a share of the training on, so many front layer modules are frozen."""

    share: float
    depth: int


class Timed(FrontPolicy):
    """Follows a timetable; a move is made at the end of the first interval that reaches its time.

    Raises:
        ConfigError: the length of the run is not known.
    """

    def __init__(
        self,
        config: Config,
        *,
        trainable: Sequence[bool],
        rule: UnfreezeRule,
        total_steps: int | None = None,
        deepest_freeze: int | None = None,
    ) -> None:
        super().__init__(config, trainable=trainable, rule=rule, total_steps=total_steps, deepest_freeze=deepest_freeze)
        if total_steps is None:
            raise ConfigError(
                f"The policy {config.policy.name!r} freezes at shares of the training, so it must know its length, "
                f"found total_steps=None. Pass total_steps=len(loader) * epochs to attach."
            )
        self._length = total_steps
        self.moves = self._timetable()
        """The timetable, in the order of time."""

    @abstractmethod
    def _timetable(self) -> tuple[Move, ...]:
        """Return the moves in the order of time."""

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Make the moves whose time has come."""
        done = interval.step / self._length
        depth = next((move.depth for move in reversed(self.moves) if move.share <= done + ROUNDING), 0)
        return self._move_to(depth, f"{done:.1%} of the training is done, and by then {self._says(depth)}")

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return the steps to the next move; None where there is none left."""
        ahead = (move.share * self._length - step for move in self.moves)
        return next((steps for steps in ahead if steps > 0), None)

    def _says(self, depth: int) -> str:
        if not depth:
            return "nothing is to be frozen"
        return f"{depth} layer module{' is' if depth == 1 else 's are'} to be frozen"

    def _num_freezable(self) -> int:
        """Return how many layer modules there are in front of the last."""
        return len(self._trainable) - 1
