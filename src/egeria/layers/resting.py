"""Updating front layer modules at some optimizer steps only: what rests at a step needs no gradient
and has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from egeria import tree
from egeria.layers.copies import PlainCopies
from egeria.layers.modules import LayerModule


@dataclass(eq=False)
class _Member:
    """One layer module that is not updated at every step."""

    parameters: list[nn.Parameter]
    """Those that the module alone trains; less those whose gradient the loop itself switched off
    meanwhile."""
    handles: list[RemovableHandle | PlainCopies]
    version: int | None = None
    """Of the parameters when their gradients were switched on: where it is the same later, no step
    was made."""


@dataclass(eq=False)
class _Resting:
    """How many front layer modules rest, for hooks to read."""

    depth: int = 0


@dataclass(eq=False)
class DutyCycle:
    """Lets front layer modules behind the frozen ones rest at the optimizer steps that are not
    theirs.

    A module that rests stays in the mode that it is in: normalisation keeps on counting, dropout is
    on. Optimizer state and groups are never touched: an optimizer passes over parameters without a
    gradient. Copies of the model are made as if nothing rested. Between steps only the parameters
    of what begins or ends to rest are touched.
    """

    model: nn.Module
    modules: Sequence[LayerModule]
    """Its layer modules, front to back."""
    freezes_tied: bool = False
    """Whether a weight rests that a module behind uses too; else it trains on through that
    alone."""

    def __post_init__(self) -> None:
        self._state = _Resting()
        self._members: dict[int, _Member] = {}
        self._first = 0
        self._has_leftovers = False
        """Whether something rests whose gradients no optimizer had used when it began to."""
        self.periods = (1,) * len(self.modules)
        """For each layer module, how many optimizer steps lie between its updates."""
        self.was_overruled = False
        """Whether the loop switched gradients on that were off, which has the last word; nothing
        moves from then on."""

    @property
    def depth(self) -> int:
        """How many front layer modules are not updated at the step to come, frozen ones included; 0
        for none at all.
        """
        return self._state.depth

    @property
    def is_active(self) -> bool:
        """Whether any layer module is updated at some steps only."""
        return bool(self._members)

    @property
    def is_undone(self) -> bool:
        """Whether the loop has switched gradients on that were off."""
        resting = (member for index, member in self._members.items() if index < self.depth)
        return self.was_overruled or any(
            entry.requires_grad for member in resting for entry in member.parameters
        )

    def hold(self) -> None:
        """Switch gradients off again that the loop has switched on of what rests."""
        for index, member in self._members.items():
            if index < self.depth:
                for parameter in member.parameters:
                    parameter.requires_grad_(False)

    def depth_at(self, step: int, first: int = 0) -> int:
        """Return how many front layer modules are not updated at an optimizer step, counted from 1.

        Args:
            step: the number of the step.
            first: how many front layer modules are frozen.
        """
        depth = first
        while depth < len(self.periods) and step % self.periods[depth]:
            depth += 1
        return depth

    def depths(self, first: int) -> list[int]:
        """Return all depths that occur, those with modules at rest, shallowest first; `first`
        modules are frozen.
        """
        return sorted({self.depth_at(step, first) for step in (1, *self.periods[first:])} - {first})

    def begin(self, periods: Sequence[int], first: int, *, input_needs_grad: bool = False) -> None:
        """Have layer modules updated by these periods from now on; everything is awake then.

        Args:
            periods: for each layer module; never smaller in front than behind.
            first: how many front layer modules are frozen; these are left alone.
            input_needs_grad: something in front of the model is in training, so nothing is
                detached.
        """
        self.end()
        self.periods, self._first = tuple(periods), first
        resting = [index for index in range(first, len(self.modules)) if periods[index] > 1]
        shared = (name for index in resting for name in self.modules[index].shared_parameters)
        kept = set() if self.freezes_tied else set(shared)
        for index in resting:
            module = self.modules[index]
            named = (
                (name, self.model.get_parameter(name))
                for name in module.parameters
                if name not in kept
            )
            parameters = [parameter for _, parameter in named if parameter.requires_grad]
            handles: list[RemovableHandle | PlainCopies] = [
                PlainCopies(parameter) for parameter in parameters
            ]
            if kept and not input_needs_grad:
                detach = partial(_detach_inputs, self._state, index)
                roots = [self.model.get_submodule(name) for name in module.submodules]
                handles += [
                    root.register_forward_pre_hook(detach, with_kwargs=True) for root in roots
                ]
            self._members[index] = _Member(parameters, handles)

    def end(self) -> None:
        """Update everything at every step, and leave the model as it was found."""
        self.wake()
        for member in self._members.values():
            for handle in member.handles:
                handle.remove()
        self._members, self.periods, self._has_leftovers = {}, (1,) * len(self.modules), False

    def wake(self) -> None:
        """Switch the gradients of everything on that rests."""
        self._move_to(self._first)
        self._state.depth = 0

    def rest_at(self, step: int) -> bool:
        """Let that rest which is not to be updated at an optimizer step; return whether anything
        changed.
        """
        if not self._members or self.was_overruled:
            return False
        if self._has_leftovers:
            self._drop_leftovers()
        depth, before = self.depth_at(step, self._first), max(self.depth, self._first)
        if depth != before:
            self._move_to(depth)
        return depth != before

    @contextmanager
    def trial(self, depth: int) -> Iterator[None]:
        """Let the layer modules up to a depth rest, to see what becomes of a forward pass; all are
        awake before.
        """
        self._move_to(depth, drops=False)
        try:
            yield
        finally:
            self.wake()
            for member in self._members.values():
                member.version = None

    def _move_to(self, depth: int, *, drops: bool = True) -> None:
        before = max(self.depth, self._first)
        for index in range(depth, before):
            self._wake(self._members[index])
        for index in range(before, depth):
            self._lay_down(self._members[index], drops=drops)
        self._state.depth = depth if depth > self._first else 0

    def _lay_down(self, member: _Member, *, drops: bool) -> None:
        """Switch gradients off, and drop those that an optimizer has used: a loop may call us
        before it steps.
        """
        if not all(parameter.requires_grad for parameter in member.parameters):
            member.parameters = [
                parameter for parameter in member.parameters if parameter.requires_grad
            ]
        is_used = member.version is None or member.version != _version(member)
        if not is_used and any(parameter.grad is not None for parameter in member.parameters):
            self._has_leftovers = True
        for parameter in member.parameters:
            parameter.requires_grad_(False)
            if drops and is_used:
                parameter.grad = None

    def _wake(self, member: _Member) -> None:
        for parameter in member.parameters:
            self.was_overruled = self.was_overruled or parameter.requires_grad
            parameter.requires_grad_(True)
        member.version = _version(member)

    def _drop_leftovers(self) -> None:
        """Drop the gradients of what rests that the optimizer had not used a step ago."""
        self._has_leftovers = False
        for index, member in self._members.items():
            if index < self.depth:
                for parameter in member.parameters:
                    parameter.grad = None


def _version(member: _Member) -> int:
    return sum(parameter._version for parameter in member.parameters)


# A function of this file, not a closure: a model may be copied in its own forward pass, hooks and
# all.


def _detach_inputs(
    state: _Resting, index: int, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Detach what enters a resting layer module: a tied weight in front of it trains through the
    modules behind.
    """
    return (tree.detach(args), tree.detach(kwargs)) if index < state.depth else None
