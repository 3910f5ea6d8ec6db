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
        self._released: dict[nn.Parameter, int] = {}
        """Bytes that are away."""
        self._moved: list[tuple[Optimizer, nn.Parameter, str]] = []
        self._handles: list[RemovableHandle] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are away from the device of their weights."""
        return sum(self._released.values())

    def follow(self, frozen: Collection[nn.Parameter]) -> bool:
        """Release the state of these parameters, and bring back that of all others; return whether any changed."""
        before = dict(self._released)
        if self._released.keys() - set(frozen):  # a thaw is of everything
            self._bring_back()
        for parameter in frozen:
            if parameter not in self._released:
                if not (self._handles or self._drops):
                    self._handles = [entry.register_step_pre_hook(self._before_step) for entry in self._optimizers]
                self._released[parameter] = sum(self._release(optimizer, parameter) for optimizer in self._optimizers)
        return before != self._released

    def _release(self, optimizer: Optimizer, parameter: nn.Parameter) -> int:
        """Release what one optimizer holds for a parameter; return its bytes."""
        state: dict[str, Any] | None = optimizer.state.get(parameter)
        if not state:
            return 0
        held = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        if self._drops:
            del optimizer.state[parameter]
        else:
            held = {name: value for name, value in held.items() if value.device == parameter.device != CPU}
            self._moved += [(optimizer, parameter, name) for name in held]
            state.update({name: value.to(CPU) for name, value in held.items()})
        return sum(value.numel() * value.element_size() for value in held.values())

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
