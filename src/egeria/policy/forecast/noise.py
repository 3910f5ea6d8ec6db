"""How much of the training loss is the noise of steps, by layer module."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NUM_INTERVALS = 5
"""Intervals over which the median is taken: a single step says little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """What the newest intervals showed, none of them from before the modules had settled."""

    parts: tuple[tuple[float | None, ...], ...] = ()
    """For each interval, by how much the noise of each layer module holds the loss up; None for a frozen one."""
    losses: tuple[float, ...] = ()

    def observe(self, part: Sequence[float | None] | None, loss: float | None) -> Noise:
        """Return it with one interval more; one without a measure or a loss says nothing."""
        if part is None or loss is None:
            return self
        return Noise(parts=(*self.parts, tuple(part))[-NUM_INTERVALS:], losses=(*self.losses, loss)[-NUM_INTERVALS:])

    def share(self, module: int, settled_loss: float | None) -> float | None:
        """Return the share of the loss that is the noise of a layer module; None while that is unknown.

        Where the loss has fallen by more than is left of it, as where all samples are learned in the end, it is the
        share of that fall: a part of what is left would be a part of nearly nothing.

        Args:
            module: the layer module.
            settled_loss: the loss at the end of the critical period; before, it falls as its beginning was bad.
        """
        known = [value for part in self.parts if (value := part[module]) is not None]
        if not known or not self.losses:
            return None
        loss = statistics.fmean(self.losses)
        measure = max(abs(loss), 0.0 if settled_loss is None else settled_loss - loss)
        return max(0.0, statistics.median(known)) / measure if measure else None

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Noise:
        """Rebuild it from `state_dict`."""
        return cls(parts=tuple(map(tuple, state["parts"])), losses=tuple(state["losses"]))
