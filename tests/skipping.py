"""What the tests of forward skipping share: two equal models, one of which skips its frozen front."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.model.batch import Batch
from egeria.model.cut import LayerModule, make_modules, read_graph
from egeria.model.freeze import Freezer
from egeria.model.group import find_pieces
from egeria.model.watch import Watch
from egeria.skipping.prefix import Prefix

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def copies(arguments: Arguments) -> Arguments:
    return tree.map_tensors(torch.clone, arguments)


def batch_of(arguments: Arguments) -> Batch:
    args, kwargs = copies(arguments)
    return Batch.of_call(args, kwargs, "cpu")


def num_rows(arguments: Arguments) -> int:
    return next(tree.leaves(arguments)).shape[0]


@dataclass
class Frozen:
    """A model whose front is frozen, on a training loop of single steps; equal seeds give equal ones."""

    build: Callable[[], nn.Module]
    example: Arguments
    depth: int = 0
    freeze_tied: bool = False
    """Whether weights that several layer modules use were frozen by their owner."""
    modules: tuple[LayerModule, ...] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.build().train()
        args, kwargs = copies(self.example)
        watch = Watch(self.model, find_pieces(self.model))
        watch.open()
        self.model(*args, **kwargs)
        watch.close()
        self.modules = make_modules(self.model, watch=watch)
        if self.freeze_tied:
            front = self.modules[: self.depth]
            own = {self.model.get_parameter(name) for module in front for name in module.parameters}
            roots = [self.model.get_submodule(name) for module in front for name in module.submodules]
            for parameter in {parameter for root in roots for parameter in root.parameters()} - own:
                parameter.requires_grad_(False)
            self.modules = make_modules(self.model, watch=watch)
        Freezer(self.model, read_graph(self.model, self.modules, watch)).freeze_to(self.depth)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def find(self) -> Prefix:
        return Prefix.find(self.model, self.modules[: self.depth], batch_of(self.example), num_rows(self.example))

    def step(self, arguments: Arguments, seed: int) -> dict[str, Any]:
        """Train one step, and return all that came of it."""
        torch.manual_seed(seed)
        self.model.train()
        args, kwargs = copies(arguments)
        given = self.model(*args, **kwargs)
        outputs = {name: value for name, value in tree.contents(given, "output") if isinstance(value, Tensor)}
        parts = [(value.double() - 1).square().mean() for value in outputs.values() if value.requires_grad]
        torch.stack(parts).sum().backward()
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        self.optimizer.step()
        self.optimizer.zero_grad()
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        random = {"random": torch.get_rng_state()}
        return {**outputs, **gradients, **buffers, **random, "argument": next(tree.leaves(args or kwargs))}


def unequal(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return the names of what is not equal to the last bit."""
    assert first.keys() == second.keys()

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b

    return [name for name, value in first.items() if not same(value, second[name])]


def assert_replay_is_computing(plain: Frozen, skipping: Frozen, prefix: Prefix, arguments: Arguments) -> None:
    """Law 3: a step with replayed activations is a computed step, in every bit, and recording changes nothing."""
    with prefix.recording() as recording:
        recorded = skipping.step(arguments, seed=1)
    assert unequal(plain.step(arguments, seed=1), recorded) == []
    rows = prefix.recorded(recording)
    assert [len(row) for row in rows] == [num_rows(arguments)] * len(prefix.row_leaves)
    computed = plain.step(arguments, seed=2)
    with prefix.replaying(rows, batch_of(arguments)):
        replayed = skipping.step(arguments, seed=2)
    assert unequal(computed, replayed) == []
    assert prefix.error(prefix.compute(batch_of(arguments)), rows) < 1e-5
    some = torch.tensor([num_rows(arguments) - 1, 0])
    for row, part in zip(rows, prefix.compute(batch_of(arguments), some), strict=True):
        assert part.shape[0] == 2 and torch.allclose(part, row[some], rtol=1e-4, atol=1e-5)
