"""The same training by hand: it freezes what a journal says, and knows nothing else of egeria."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from soak.training import Course, Pilot, Training


class ByHand(Pilot):
    """Freezes layer modules by `requires_grad`, modes and gradients, at the moments of a course."""

    wraps = False

    def __init__(self, course: Course) -> None:
        self.course, self.depth = course, 0
        self._held: list[set[str]] = []
        """For each frozen layer module the parameters that were switched off with it."""
        self._still = set[nn.Module]()
        self._before = dict[nn.Module, bool]()
        self._modes: tuple[bool, ...] = ()
        self._handles = list[Any]()

    def open(self, training: Training) -> None:
        self.training = training
        self.watch(training.model, training.case.spec.tied)

    def watch(self, model: nn.Module, tied: tuple[str, ...] = ()) -> None:
        """Begin with this model."""
        self.model, self.tied = model, tied
        self._handles += [model.register_forward_pre_hook(self._enter), model.register_forward_hook(self._leave)]
        if tied:  # without them a cut of the graph changes no number
            for number, module in enumerate(self.course.modules, start=1):
                tap = model.get_submodule(module["tap"])
                self._handles.append(tap.register_forward_hook(lambda *given, n=number: self._cut(n, given[-1])))

    def start(self, step: int) -> None:
        self.freeze(self.course.starts.get(step, 0) if self._handles else 0)

    def update(self, step: int, make: Callable[[], None]) -> None:
        self.freeze(self.course.updates.get(step, 0))
        make()

    def tell(self, loss: Any, *, is_micro: bool = False) -> None:
        if not is_micro:
            self.freeze(self.course.ends.get(self.training.step, self.depth))

    def close(self) -> None:
        self.freeze(0)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def switch(self, name: str, parameter: nn.Parameter, flag: bool) -> None:
        """Switch a parameter for the user, who is the owner of it from then on."""
        parameter.requires_grad_(flag)
        for names in self._held:
            names.discard(name)

    def freeze(self, depth: int) -> None:
        """Freeze so many front layer modules; thaw the others."""
        if depth == self.depth:
            return
        named = dict(self.model.named_parameters(remove_duplicate=False))
        while len(self._held) > depth:
            for name in self._held.pop():
                named[name].requires_grad_(True)
        for module in self.course.modules[len(self._held) : depth]:
            own = {name for name in module["parameters"] if named[name].requires_grad}
            self._held.append(own)
            for name in own:
                named[name].requires_grad_(False)
                named[name].grad = None
        self.depth, self._still = depth, self._find_still(depth)

    def _find_still(self, depth: int) -> set[nn.Module]:
        """Return the submodules of frozen layer modules that no active one uses."""
        parts = [
            {part for name in module["submodules"] for part in self.model.get_submodule(name).modules()}
            for module in self.course.modules
        ]
        later = set[nn.Module]().union(*parts[depth:])
        front = [own for own, held in zip(parts, self._held, strict=False) if held]
        trains = {part for part in self.model.modules() if any(p.requires_grad for p in part.parameters(recurse=False))}
        return set[nn.Module]().union(*front) - later - trains

    def _enter(self, *_: Any) -> None:
        self._before = {part: part.training for part in self._still}
        for part in self._still:
            part.training = False
        self._modes = tuple(part.training for part in self.model.modules())

    def _leave(self, *_: Any) -> None:
        for part, mode in self._before.items():
            part.training = mode

    def modes(self, model: nn.Module) -> tuple[bool, ...]:
        return self._modes if self._handles else super().modes(model)

    def _cut(self, number: int, output: Tensor) -> Tensor | None:
        if number != self.depth:
            return None
        names = {name for module in self.course.modules[:number] for name in module["parameters"]}
        if any(self.model.get_parameter(name).requires_grad for name in names.difference(self.tied)):
            return None
        return output.detach()

    def share(self) -> None:
        """Give the second rank the buffers of the first one."""
        for buffer in self.model.buffers() if self.training.case.ranks > 1 else ():
            distributed.broadcast(buffer, 0)

    def reduce(self) -> None:
        """Take the mean of the gradients of two ranks."""
        if self.training.case.ranks == 1:
            return
        own = [entry for entry in self.training.named.values() if entry.requires_grad]
        flags = torch.tensor([entry.grad is not None for entry in own], dtype=torch.float32)
        distributed.all_reduce(flags)
        for entry, flag in zip(own, flags.tolist(), strict=True):
            if flag:
                entry.grad = torch.zeros_like(entry) if entry.grad is None else entry.grad / 2
                distributed.all_reduce(entry.grad)
