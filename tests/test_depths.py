"""How deep a model freezes: each output keeps its last gradient, whatever a model returns and however it is called."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from test_field_cases import Block, Chain, sort, vectors
from twins import PLANS, Program, Twin, check_by_hand, declined

pytestmark = pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")


class Disorder(nn.Module):
    """Defined in another order than it runs, with parameters of its own in front and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.parts = nn.Linear(8, 3), nn.ModuleList(Block() for _ in range(4))
        self.position, self.scale, self.stem = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(())), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.position
        for index in (2, 0, 3, 1):
            x = self.parts[index](x)
        return self.head(x) * self.scale


class Routed(Block):
    """Keeps a loss of its own for the model to add, as mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        self.extra = self.inner(x).square().mean()
        return super().forward(x)


class Mixture(Chain):
    def __init__(self) -> None:
        super().__init__(Routed)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean() + sum(part.extra for part in self.blocks)


class Teacher(Chain):
    """Learns from chains that run without gradients: one of its own, and itself."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        with torch.no_grad():
            wanted = x
            for part in (*self.teacher, *self.blocks[:2]):
                wanted = part(wanted)
        return output - self.head(wanted).detach()


class Early(Chain):
    """Returns what is in the middle, too."""

    def forward(self, x: Tensor) -> Any:
        middle = self.blocks[1](self.blocks[0](x))
        return {"middle": middle, "late": [self.head(self.blocks[4](self.blocks[3](self.blocks[2](middle))))]}


@dataclass
class Pair:
    left: Any
    right: Any


class Players(nn.Module):
    """Two chains whose outputs come in an object of the loop's own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Pair:
        return Pair(self.left[1](self.left[0](x)), self.right[1](self.right[0](x)))


class Checkpointed(Chain):
    """Computes its blocks anew, by reentrant checkpoints in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def by_parts(model: Any, number: int) -> Tensor:
    left, right = vectors(number), vectors(number + 100)
    return (model.left[1](model.left[0](left)) @ model.right[1](model.right[0](right)).T).square().mean()


def both(model: Any, number: int) -> Tensor:
    output = model(vectors(number))
    return output["middle"].square().mean() + output["late"][0].square().mean()


def one_by_one(model: Any, optimizers: Any, number: int) -> Tensor:
    output = model(vectors(number))
    output["middle"].square().mean().backward(retain_graph=True)
    output["late"][0].square().mean().backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    return output["middle"].mean().detach()


def squared(model: Any, number: int) -> Tensor:
    return model(vectors(number)).square().mean()


DEPTHS: dict[str, tuple[Program, int | None]] = {
    "disorder": (Program(build=Disorder, loss=sort), None),
    "mixture": (Program(build=Mixture, loss=squared), None),
    "teacher": (Program(build=Teacher, loss=sort), None),
    "early, one loss": (Program(build=Early, loss=both), None),
    "early, a loss each": (Program(build=Early, loss=both, update=one_by_one), 1),
    "early, that alone": (Program(build=Early, loss=lambda m, n: m(vectors(n))["middle"].square().mean()), 1),
    "towers, part by part": (Program(build=Players, loss=by_parts), 1),
    "players": (Program(build=Players, loss=lambda m, n: m(vectors(n)).left.square().mean()), 1),
}


@pytest.mark.parametrize("kind", DEPTHS)
def test_a_model_freezes_as_deep_as_its_outputs_allow(kind, tmp_path):
    program, deepest = DEPTHS[kind]
    check_by_hand(program, tmp_path, PLANS[0], deepest=deepest).run.close()
    reasons = declined(tmp_path)
    assert len(reasons) == (deepest is not None)
    assert all("depends on nothing after" in reason for reason in reasons), reasons


def test_reentrant_checkpoints_are_declined_with_the_way_out(tmp_path):
    ours = Twin(Program(build=Checkpointed, loss=sort)).attach(tmp_path, plan=PLANS[0]).train()
    assert ours.run.frozen == 0 and "use_reentrant=False" in declined(tmp_path)[-1]
    ours.run.close()


def test_shares_go_by_rows_of_passes_with_gradients_alone(tmp_path):
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(3))
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = functional.max_pool2d(part(x), 2)
            return self.head(x.mean((2, 3)))

    def loss(model: Any, number: int) -> Tensor:
        with torch.no_grad():
            model.eval()(torch.randn(50, 4, 32, 32))  # a sanity check, as Lightning makes one
        with pytest.raises(RuntimeError):
            model.train()(torch.randn(6, 7))
        return model(torch.randn(2, 4, 16, 16)).square().mean()

    ours = Twin(Program(build=Pyramid, loss=loss)).attach(tmp_path, plan="0.5:1").train()
    shares = [module.share for module in ours.run.modules]
    assert shares[0] == pytest.approx(4 * shares[1]) and sum(shares) == pytest.approx(1)
    ours.run.close()
