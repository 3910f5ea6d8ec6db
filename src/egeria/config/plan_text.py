"""The text of a plan: how many front layer modules are frozen, from when on."""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

PLAN_TEXT = 'text such as "0.5:1 0.6:2 0.75:4" or "step 500:2"'
_MOVE = re.compile(r"(step \s*(?P<step>\d+)|(?P<share>\d+\.?\d*|\.\d+)):(?P<depth>\d+)(?=\s|$)")


class Move(NamedTuple):
    """One entry of a plan: from this moment on the first `depth` layer modules are frozen."""

    time: float
    """Share of the training's steps, from 0 to below 1; or the number of a step."""
    depth: int
    is_step: bool = False
    """Whether `time` is the number of a step."""

    def step(self, total_steps: int | None) -> float:
        """Return how many steps of the training are done at this moment."""
        return self.time if self.is_step else self.time * (total_steps or 0)

    def __str__(self) -> str:
        time = repr(self.time) if self.time >= 1e-4 or not self.time else f"{self.time:.12f}"
        return f"{'step ' if self.is_step else ''}{time.removesuffix('.0')}:{self.depth}"


def read_plan(text: str) -> tuple[Move, ...]:
    """Return the moves of a text that `wrong_plan` finds nothing wrong with."""
    return tuple(
        Move(float(found["step"] or found["share"]), int(found["depth"]), bool(found["step"]))
        for found in _MOVE.finditer(text)
    )


def wrong_plan(text: Any) -> str:
    """Rule for the text of a plan: return what it would have to be, empty where it is that."""
    if not isinstance(text, str):
        return f"{PLAN_TEXT}: share of the steps, or a step, and how many modules are frozen then"
    rest = " ".join(_MOVE.sub(" ", text).split())
    if rest:
        return f"{PLAN_TEXT}, where {rest!r} is no share or step : number of layer modules"
    moves = read_plan(text)
    for kind, what in ((False, "shares of the steps"), (True, "steps")):
        times = [move.time for move in moves if move.is_step is kind]
        if any(later <= earlier for earlier, later in itertools.pairwise(times)):
            return f"{PLAN_TEXT}, with {what} that rise from entry to entry"
    largest = max((move.time for move in moves if not move.is_step), default=0.0)
    if largest >= 1:
        return f"{PLAN_TEXT}, with shares of the steps below 1 and not {largest:g}"
    return ""
