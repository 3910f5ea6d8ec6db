"""Compiled models: no graphs before the cut, room for those after it, and their cost."""

from typing import Any

import torch
from torch import nn

GRAPHS_PER_DEPTH = 2  # of one function: in training and in evaluation
_LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model, a part of it or its wrapper is compiled."""
    return any(
        module._compiled_call_impl is not None
        or hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")
        for module in model.modules()
    )


class Compilation:
    """Adapts the settings of torch for a compiled model up to `close`; measures compiling."""

    def __init__(self) -> None:
        self._before: Any = None
        self._eager: Any = None
        self._limits: dict[str, int] = {}  # of torch, as the user has them
        self._seen_s = seconds_so_far()
        self._longest_s = 0.0

    def wait(self) -> None:
        """Run everything uncompiled up to `begin`: hooks see the passes, and no graph is made."""
        if self._eager is None:
            frames: Any = torch._dynamo.eval_frame
            self._before = frames._stance
            self._eager = type(self._before)("force_eager")
            frames._set_stance(self._eager)

    def begin(self, num_modules: int) -> None:
        """Let torch compile again, as often as freezing so many layer modules may need."""
        self._restore_stance()
        config: Any = torch._dynamo.config
        for name in _LIMITS:  # after eight graphs a function would run uncompiled for good
            limit = self._limits.setdefault(name, getattr(config, name))
            setattr(config, name, limit + GRAPHS_PER_DEPTH * (num_modules + 1))
        self._seen_s = seconds_so_far()

    def look(self) -> float:
        """Return the seconds that torch has compiled since the last call."""
        now = seconds_so_far()
        spent, self._seen_s = now - self._seen_s, now
        self._longest_s = max(self._longest_s, spent)
        return spent

    def repays(self, saved_s: float) -> str | None:
        """Return why saving so many seconds would not repay compiling; None if it would."""
        if saved_s >= self._longest_s:
            return None
        saves = f"it would save {saved_s:.2g} s to the end of the run"
        return f"{saves}, and compiling took up to {self._longest_s:.2g} s"

    def close(self) -> None:
        """Give torch its settings back; can be called again after an interrupt."""
        self._restore_stance()
        for name in list(self._limits):
            setattr(torch._dynamo.config, name, self._limits[name])
            del self._limits[name]

    def _restore_stance(self) -> None:
        frames: Any = torch._dynamo.eval_frame
        if self._eager is not None and frames._stance is self._eager:
            frames._set_stance(self._before)
        self._eager = None


def seconds_so_far() -> float:
    """Return the seconds that torch has compiled in this process, forward and backward passes."""
    return float(torch._dynamo.utils.calculate_time_spent().get("total_wall_time", 0.0))
