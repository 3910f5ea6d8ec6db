"""Trainings in pairs: one that egeria freezes, and one whose author freezes the same layers by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import egeria
from egeria import tree
from laws.support import differences

NUM_STEPS = 10
PLANS = ("0:20 0.25:0 0.6:2", "0.3:1 0.6:3")


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([entry for entry in model.parameters() if entry.requires_grad], lr=1e-2)]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model and the loop around it."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, int], Tensor]
    """Makes the forward pass of a step, by its number."""
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = adamw
    update: Callable[[Any, Any, int], Tensor] | None = None
    """The whole step, `update(model, optimizers, number)`, where it is more than a loss and its backward pass."""
    prepare: Callable[[Any], object] = nn.Module.train
    """What the loop calls in front of each step."""
    detaches: Callable[[str, int], bool] = lambda tap, step: False
    """Whether the output of a frozen front that ends there is detached, since tied weights would keep its backward
    pass, or since inputs require a gradient for the sake of checkpoints."""
    keeps: tuple[str, ...] = ()
    """Submodules that keep their mode, since active layers use them too."""


class Twin:
    """One training. As it is made nothing is attached."""

    def __init__(self, program: Program, *, num_steps: int = NUM_STEPS) -> None:
        torch.manual_seed(0)
        self.program, self.num_steps, self.model = program, num_steps, program.build()
        self.optimizers = program.optimizers(self.model)
        self.losses, self.number = list[float](), 0
        self.depths = list[tuple[int, int]]()
        """For each step how many layer modules were frozen in its updates, and for the next one."""

    def attach(self, directory: Any, **given: Any) -> "Twin":
        """Attach egeria, and note what it freezes."""
        self.run: Any = egeria.attach(
            self.model, self.optimizers, total_steps=self.num_steps, directory=directory, **given
        )
        self.optimizers[-1].register_step_pre_hook(self._look)  # behind those of the library
        return self

    def train(self) -> "Twin":
        """Train to the end."""
        while self.number < self.num_steps:
            self.begin()
            loss = self.update()
            self.losses.append(loss.item())
            self.end(loss)
            self.number += 1
        self.random = torch.get_rng_state()
        return self

    def begin(self) -> None:
        self.program.prepare(self.model)

    def update(self) -> Tensor:
        if self.program.update is not None:
            return self.program.update(self.model, self.optimizers, self.number)
        loss = self.program.loss(self.model, self.number)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def end(self, loss: Tensor) -> None:
        self.run.step(loss)
        self.depths.append((self._in_step, self.run.frozen))

    def _look(self, *_: Any) -> None:
        self._in_step = self.run.frozen

    def everything(self) -> dict[str, Any]:
        """Return all that a training changes."""
        state = dict(self.model.state_dict(keep_vars=False))
        for number, optimizer in enumerate(self.optimizers):
            for index, entry in optimizer.state_dict()["state"].items():
                state |= {f"optimizer {number}.{index}.{name}": value for name, value in entry.items()}
        return {**state, "losses": self.losses, "random": self.random}


class ByHand(Twin):
    """The same loop, which itself freezes what another had frozen."""

    def __init__(self, other: Twin) -> None:
        super().__init__(other.program, num_steps=other.num_steps)
        self._modules, self._steps, self._depth = other.run.modules, other.depths, 0
        self._trained = {name for name, entry in self.model.named_parameters() if entry.requires_grad}
        for number, module in enumerate(self._modules, 1):
            tap = self.model.get_submodule(module.tap)
            tap.register_forward_hook(lambda _m, _a, output, number=number: self._cut(number, output))
        self.optimizers[-1].register_step_pre_hook(lambda *_: self._freeze(self._steps[self.number][0]))

    def begin(self) -> None:
        super().begin()
        self._freeze(self._steps[self.number - 1][1] if self.number else 0)

    def end(self, loss: Tensor) -> None:
        pass

    def _freeze(self, depth: int) -> None:
        self._depth = depth
        frozen = {name for module in self._modules[:depth] for name in module.parameters}
        for name, parameter in self.model.named_parameters():
            if name in self._trained:
                parameter.requires_grad_(name not in frozen)
            if name in frozen:
                parameter.grad = None
        for name in [name for module in self._modules[:depth] if module.parameters for name in module.submodules]:
            self.model.get_submodule(name).eval()
        last = self._modules[-1].submodules if depth and depth == len(self._modules) - 1 else ()
        for part in (part for name in last for part in self.model.get_submodule(name).modules()):
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.eval()
        for name in self.program.keeps:
            self.model.get_submodule(name).training = True

    def _cut(self, number: int, output: Any) -> Any:
        module = self._modules[number - 1]
        if number != self._depth or not torch.is_grad_enabled():
            return None
        if not self.program.detaches(module.tap, self.number):
            return None
        return tree.map_tensors(lambda tensor: tensor.detach() if tensor.requires_grad else tensor, output)


def check_by_hand(program: Program, directory: Any, plan: str, *, deepest: int | None = None, **given: Any) -> Twin:
    """Train twice and compare every bit; return the attached training, still open.

    Args:
        deepest: how many layer modules can be frozen at most; all but one without it.
    """
    ours = Twin(program).attach(directory, plan=plan, **given).train()
    limit = len(ours.run.modules) - 1 if deepest is None else deepest
    wanted = [min(int(entry.partition(":")[2]), limit) for entry in plan.split()]
    found = moves([depth for pair in ours.depths for depth in pair])
    assert found == moves(wanted), f"{found}, {declined(directory)}"
    differing = differences(ByHand(ours).train().everything(), ours.everything())
    assert differing == [], differing[:5]
    return ours


def moves(depths: list[int]) -> list[int]:
    """Return the depths that come after each other, from nothing frozen on."""
    return [depth for depth, before in zip(depths, [0, *depths], strict=False) if depth != before]


def declined(directory: Any) -> list[str]:
    """Return what a journal says was declined, each with its reason."""
    events = egeria.read_journal(directory).events
    return [f"{event.what}: {event.reason}" for event in events if event.kind == "declined"]


def hooks_on(model: nn.Module) -> int:
    """Return how many hooks of ours are on a model and its parameters."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks")
    owners = [*model.modules(), *model.parameters()]
    tables = [getattr(owner, name, None) or {} for owner in owners for name in names]
    return sum(type(hook).__module__.startswith("egeria") for table in tables for hook in table.values())
