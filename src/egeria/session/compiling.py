"""Models under `torch.compile`: room for their graphs, what compiling takes, and whether a freeze repays it."""

from __future__ import annotations

import sys
from typing import Any

from egeria.events import Recompiled
from egeria.journal.recorder import Recorder
from egeria.session.following import ModelHandle

BACKWARD_SHARE = 2 / 3
"""Of an iteration: the backward pass has two multiplications where the forward pass has one."""
GRAPHS_PER_FREEZE = 2
"""In training and in inference."""


class Compiling:
    """Watches what a compiled model costs; where nothing is compiled it does nothing.

    A freeze changes what needs a gradient, so that the next forward pass is compiled again. After eight graphs of a
    function torch goes over to running it uncompiled, for good: the limit is raised by what freezing may need, and
    lowered again at the end.

    Args:
        handle: what the loop calls, which sees whether it is compiled.
        recorder: records compilations.
    """

    def __init__(self, handle: ModelHandle, recorder: Recorder) -> None:
        self._handle = handle
        self._recorder = recorder
        self._limits: dict[str, int] = {}
        """Those of torch, as they were."""
        self._seconds = _seconds_so_far()
        self._dearest_s = 0.0
        """What the longest compiling took."""
        self._changes = 0
        """Freezes and thaws since compiling was last seen."""

    @property
    def is_on(self) -> bool:
        """Return whether calls of the model are compiled."""
        return bool(self._handle.is_compiled)

    def make_room(self, num_modules: int) -> None:
        """Let as many graphs of a function be compiled as freezing module by module needs."""
        if not self.is_on or self._limits:
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
        if not self.is_on:
            return 0.0
        seconds = _seconds_so_far()
        spent, self._seconds = seconds - self._seconds, seconds
        if spent <= 0.0:
            return 0.0
        self._dearest_s = max(self._dearest_s, spent)
        is_ours, self._changes = self._changes > 0, 0
        self._recorder.write(Recompiled(step=step, wall_s=spent, by_freezing=is_ours))
        return spent if is_ours else 0.0

    def reason_to_wait(self, saved_s: float | None) -> str | None:
        """Return why a freeze has to wait, None if it repays what compiling takes.

        Args:
            saved_s: seconds that it saves to the end of the run; None where that is unknown.
        """
        if not self.is_on or saved_s is None or saved_s >= self._dearest_s:
            return None
        saves = f"it would save {saved_s:.2g} s to the end of the run"
        return f"{saves}, and compiling anew took up to {self._dearest_s:.2g} s"

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
