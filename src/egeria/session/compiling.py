"""What freezing costs a compiled model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from egeria.events import Recompiled
from egeria.journal import Recorder
from egeria.session.following import ModelHooks

GRAPHS_PER_FREEZE = 2
"""In training and in inference."""


@dataclass(eq=False)
class Compiling:
    """Watches what a compiled model costs (`torch.compile`); where nothing is compiled it does
    nothing.

    A freeze changes what needs a gradient, so that the next forward pass is compiled again.
    After eight graphs of a function torch goes over to
    running it uncompiled, for good: the limit is raised by what freezing may need, and lowered
    again at the end.
    """

    hooks: ModelHooks
    """On the model; they see whether it is compiled."""
    recorder: Recorder

    def __post_init__(self) -> None:
        self._limits: dict[str, int] = {}
        """Those of torch, as they were."""
        self._seconds = _seconds_so_far()
        self._longest_s = 0.0
        """What the longest compiling took."""
        self._changes = 0
        """Freezes and thaws since compiling was last seen."""

    def make_room(self, num_modules: int) -> None:
        """Let as many graphs of a function be compiled as freezing module by module needs."""
        if not self.hooks.is_compiled or self._limits:
            return
        config: Any = _dynamo().config
        for name, needed in (
            ("recompile_limit", GRAPHS_PER_FREEZE * (num_modules + 1)),
            ("accumulated_recompile_limit", 0),
        ):
            if hasattr(config, name):
                self._limits[name] = getattr(config, name)
                setattr(config, name, self._limits[name] + needed)

    def note_change(self) -> None:
        """Take note that layers were frozen or thawed: what compiles next does so for that."""
        self._changes += 1

    def look(self, step: int) -> float:
        """Return the seconds that freezing made the last iterations compile, and journal them."""
        if not self.hooks.is_compiled:
            return 0.0
        seconds = _seconds_so_far()
        spent, self._seconds = seconds - self._seconds, seconds
        if spent <= 0.0:
            return 0.0
        self._longest_s = max(self._longest_s, spent)
        is_ours, self._changes = self._changes > 0, 0
        self.recorder.write(Recompiled(step=step, wall_s=spent, by_freezing=is_ours))
        return spent if is_ours else 0.0

    def reason_to_wait(self, saved_s: float | None) -> str | None:
        """Return why a freeze that saves so many seconds (None: unknown) has to wait; None if it
        repays compiling.
        """
        if saved_s is None or saved_s >= self._longest_s:
            return None
        saves = f"it would save {saved_s:.2g} s to the end of the run"
        return f"{saves}, and compiling anew took up to {self._longest_s:.2g} s"

    def close(self) -> None:
        """Give torch its limits back."""
        limits, self._limits = self._limits, {}
        for name, value in limits.items():
            setattr(_dynamo().config, name, value)


def _seconds_so_far() -> float:
    """Return the seconds that torch has compiled in this process, forward and backward passes."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    spent: dict[str, float] = getattr(_dynamo().utils, "calculate_time_spent", dict)()
    return float(spent.get("total_wall_time", 0.0))


def _dynamo() -> Any:
    return sys.modules["torch._dynamo"]
