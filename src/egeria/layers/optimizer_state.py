"""Moving the optimizer's state of frozen parameters out of the way, and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

CPU = torch.device("cpu")


class ReleasedState:
    """The optimizer's state of parameters that are frozen, in main memory or dropped.

    An optimizer steps what has a gradient, so that it does not meet what was moved; where the loop trains a frozen
    parameter nevertheless, a hook on its step brings the state back first. What it saves is complete, but for what was
    dropped. State that somebody loads meanwhile stays where it is loaded.

    Args:
        optimizers: of the user.
        drops: throw it away rather than move it; the optimizer begins anew for what thaws.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, drops: bool) -> None:
        self._optimizers, self._drops = optimizers, drops
        self._released: set[nn.Parameter] = set()
        self._moved: list[tuple[Optimizer, nn.Parameter, str]] = []
        self._handles: list[RemovableHandle] = []

    def follow(self, frozen: Collection[nn.Parameter]) -> None:
        """Release the state of these parameters, and bring back that of all others."""
        if self._released - set(frozen):  # a thaw is of everything
            self._bring_back()
        for parameter in set(frozen) - self._released:
            self._released.add(parameter)
            for optimizer in self._optimizers:
                self._release(optimizer, parameter)
        if self._moved and not self._handles:
            self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in self._optimizers]

    def _release(self, optimizer: Optimizer, parameter: nn.Parameter) -> None:
        state: dict[str, Any] | None = optimizer.state.get(parameter)
        if state and self._drops:
            del optimizer.state[parameter]
        for name, value in (state or {}).items():
            if not self._drops and isinstance(value, Tensor) and value.device == parameter.device != CPU:
                self._moved.append((optimizer, parameter, name))
                state[name] = value.to(CPU)  # type: ignore[index]

    def _bring_back(self) -> None:
        moved, self._moved = self._moved, []
        self._released.clear()
        while self._handles:
            self._handles.pop().remove()
        self._return(moved)

    def _before_step(self, *_args: Any) -> None:
        self._return([entry for entry in self._moved if entry[1].grad is not None])

    def _return(self, entries: Sequence[tuple[Optimizer, nn.Parameter, str]]) -> None:
        """Move state back; where there is no room the optimizer begins anew for the parameter, rather than fail."""
        for optimizer, parameter, name in entries:
            state = optimizer.state.get(parameter, {})
            try:
                if isinstance(state.get(name), Tensor):
                    state[name] = state[name].to(parameter.device)
            except RuntimeError:  # out of memory
                optimizer.state.pop(parameter, None)
