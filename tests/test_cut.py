"""The cut that the first passes of a training give: order, what freezes, how deep, and where it may be detached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cuts import check_depths, cut_behind, num_hooks, text_of, watched
from egeria.errors import StateError
from egeria.model.cut import Cut
from egeria.model.group import find_pieces
from egeria.model.watch import Watch


class Part(nn.Module):
    """A residual block."""

    def __init__(self, width=8):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 16), nn.Linear(16, width)

    def half(self, x):
        return self.outer(torch.relu(self.inner(x)))

    def forward(self, x):
        return x + self.half(x)


class Chain(nn.Module):
    """Four blocks and a head."""

    def __init__(self, make=Part, count=4):
        super().__init__()
        self.parts = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.head(x)


class Disorder(nn.Module):
    """Defined in another order than it runs, with parameters of its own in front and behind."""

    def __init__(self):
        super().__init__()
        self.head, self.parts = nn.Linear(8, 3), nn.ModuleList(Part() for _ in range(4))
        self.position, self.scale, self.stem = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(())), Part()

    def forward(self, x):
        x = self.stem(x) + self.position
        for index in (2, 0, 3, 1):
            x = self.parts[index](x)
        return self.head(x) * self.scale


class Twice(Chain):
    """Its first block runs again behind the second; a dropout serves all."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        for index in (0, 1, 0, 2, 3):
            x = self.drop(self.parts[index](x))
        return self.head(x)


class Towers(nn.Module):
    """Two chains, which the loop calls part by part."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.ModuleList(Part() for _ in range(2)) for _ in range(2))

    def forward(self, x):
        raise NotImplementedError


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return torch.relu(x + self.norm2(self.conv2(torch.relu_(self.norm1(self.conv1(x))))))


def images():
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.Sequential(Residual(), Residual()) for _ in range(2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )


class Tied(nn.Module):
    """Its table is the matrix of the output too, by a submodule or by none."""

    def __init__(self, *, by_submodule=True):
        super().__init__()
        self.table, self.parts = nn.Embedding(8, 8), nn.ModuleList(Part() for _ in range(4))
        if by_submodule:
            self.head = nn.Linear(8, 8, bias=False)
            self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table(x.argmax(dim=1))
        for part in self.parts:
            x = part(x)
        return self.head(x) if hasattr(self, "head") else functional.linear(x, self.table.weight)


class Checkpointed(Chain):
    """Computes its blocks anew."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.stem, self.use_reentrant = nn.Linear(8, 8), use_reentrant

    def forward(self, x):
        x = self.stem(x)
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Routed(Part):
    """Keeps a loss of its own for the model to add, as mixtures of experts do."""

    def forward(self, x):
        self.extra = self.inner(x).square().mean()
        return super().forward(x)


class Mixture(Chain):
    def __init__(self):
        super().__init__(Routed)

    def forward(self, x):
        return super().forward(x).square().mean() + sum(part.extra for part in self.parts)


class Teacher(Chain):
    """Learns from chains that run without gradients: one of its own, and itself."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.ModuleList(Part() for _ in range(4))

    def forward(self, x):
        output = super().forward(x)
        with torch.no_grad():
            wanted = x
            for part in (*self.teacher, *self.parts[:2]):
                wanted = part(wanted)
        return output - self.head(wanted).detach()


class Early(Chain):
    """Returns what is in the middle, too."""

    def forward(self, x):
        middle = self.parts[1](self.parts[0](x))
        return {"middle": middle, "late": [self.head(self.parts[3](self.parts[2](middle)))]}


@dataclass
class Pair:
    left: Any
    right: Any


class Players(Towers):
    """Two chains whose outputs come in an object of the loop's own."""

    def forward(self, x):
        return Pair(self.left[1](self.left[0](x)), self.right[1](self.right[0](x)))


def frozen_front():
    model = Chain()
    model.parts[:2].requires_grad_(False)
    return model


def square(model, i, shape=(6, 8)):
    return model(torch.randn(*shape, generator=torch.Generator().manual_seed(i))).square().mean()


def by_parts(model, i):
    left, right = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(i))
    return (model.left[1](model.left[0](left)) @ model.right[1](model.right[0](right)).T).square().mean()


def one_backward(model, i):
    output = model(torch.randn(6, 8))
    return output["middle"].square().mean() + output["late"][0].square().mean()


def one_backward_each(model, i):
    output = model(torch.randn(6, 8))
    output["middle"].square().mean().backward(retain_graph=True)
    output["late"][0].square().mean().backward()


KINDS = {
    # kind: (model, step, names, needs, detaches)
    "norms": (images, lambda m, i: square(m, i, (4, 1, 6, 6)), "3.0 3.1 4.0 4.1", "0123", "0111"),
    "disorder": (Disorder, square, "stem parts.2 parts.0 parts.3 parts.1", "01234", "01111"),
    "twice": (Twice, square, "parts.1 parts.0 parts.2 parts.3", "0123", "0011"),
    "towers": (Towers, by_parts, "left.0 left.1 right.0 right.1", "01 23", "0111"),
    "tied": (Tied, square, "parts.0 parts.1 parts.2 parts.3", "0123", "0111"),
    "tied without a submodule": (lambda: Tied(by_submodule=False), square, None, "0123", "0111"),
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), square, None, "0123", "0111"),
    "reentrant": (lambda: Checkpointed(use_reentrant=True), square, None, "0123", "0111"),
    "mixture": (Mixture, square, None, "0123", "0111"),
    "teacher": (Teacher, square, "parts.0-parts.1 parts.2 parts.3", "012", "011"),
    "early, one loss": (Early, one_backward, None, "0123", "0111"),
    "early, a loss each": (Early, one_backward_each, None, "01 0123", "0111"),
    "early, that alone": (Early, lambda m, i: m(torch.randn(6, 8))["middle"].sum(), None, "01", "0110"),
    "players": (Players, lambda m, i: m(torch.randn(6, 8)).left.sum(), "left.0 left.1 right.0 right.1", "01", "0110"),
    "frozen front": (frozen_front, square, None, "23", "0001"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_first_pass_says_of_a_model(kind):
    build, step, names, needs, detaches = KINDS[kind]
    torch.manual_seed(0)
    model = build()
    found = cut_behind(model, step)
    assert [module.name for module in found.modules] == (names or "parts.0 parts.1 parts.2 parts.3").split()
    assert " ".join("".join(map(str, need)) for need in found.needs) == needs
    assert text_of(found.detaches) == detaches
    if kind != "reentrant":
        assert found.deepest == min([len(found.modules) - 1, *(need[-1] for need in found.needs)])
        check_depths(build, step, found)


def owner_of(found, name):
    """The layer modules that a parameter freezes with."""
    return [index for index, module in enumerate(found.modules) if name in module.parameters]


def test_parameters_belong_to_the_last_that_uses_them():
    found = cut_behind(Disorder(), square)
    assert owner_of(found, "position") == [1] and owner_of(found, "scale") == owner_of(found, "head.weight") == [4]
    assert owner_of(cut_behind(Twice(), square), "parts.0.inner.weight") == [1]
    for by_submodule in (True, False):
        model = Tied(by_submodule=by_submodule)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert owner_of(cut_behind(model, square), "table.weight") == [3]
    found = cut_behind(Mixture(), square)
    assert owner_of(found, "parts.0.inner.weight") == [0], "a loss that a block keeps is no use of its weights behind"


def test_only_what_received_a_gradient_freezes():
    assert cut_behind(frozen_front(), square).trainable == (False, False, True, True)
    found = cut_behind(Teacher(), square)
    assert not any("teacher" in name for module in found.modules for name in module.submodules)


def test_passes_without_gradients_and_recomputation_are_left_out():
    model = Checkpointed(use_reentrant=False)

    def step(model, i):
        with torch.no_grad():
            Chain.forward(model, torch.randn(3, 8))
            model.eval()(torch.randn(500, 8))
        return square(model.train(), i)

    watch = watched(model, step)
    assert {name: watch.rows[name] for name in watch.order} == dict.fromkeys(watch.order, 6)
    assert len(watch.outputs) == 1 and not watch.silent and not watch.hidden
    assert list(watch.order) == ["stem", *(f"parts.{i}" for i in range(4)), "head"]


def test_shares_go_by_rows():
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts, self.head = nn.ModuleList(Residual() for _ in range(3)), nn.Linear(4, 2)

        def forward(self, x):
            for part in self.parts:
                x = functional.max_pool2d(part(x), 2)
            return self.head(x.mean((2, 3)))

    first, second, third = cut_behind(Pyramid(), lambda model, i: square(model, i, (2, 4, 16, 16))).modules
    assert first.share == pytest.approx(4 * second.share) and first.share + second.share + third.share == 1


# --- what is refused, and why ---


def test_the_reason_says_why_not_deeper():
    assert cut_behind(Early(), one_backward_each).reason == "an output depends on nothing behind parts.1 that trains"
    found = cut_behind(Checkpointed(use_reentrant=True), square)
    assert found.is_reentrant and found.deepest == 0
    assert found.reason.startswith("parts.0 runs in a reentrant checkpoint") and "use_reentrant=False" in found.reason


# --- the watch in the user's passes ---


def test_an_error_of_ours_ends_no_pass(monkeypatch):
    model = Chain()
    watch = Watch(model, find_pieces(model))
    watch.open()
    monkeypatch.setattr("egeria.tree.contents", lambda output: 1 / 0)
    square(model, 0).backward()
    watch.close()
    assert watch.failure.startswith("ZeroDivisionError") and num_hooks(model) == 0


def test_a_pass_that_raises_is_forgotten():
    def step(model, i):
        with pytest.raises(RuntimeError):
            model(torch.randn(6, 7))
        with pytest.raises(RuntimeError):
            model.parts[0](torch.randn(6, 7))
        return square(model, i)

    assert cut_behind(Chain(), step) == cut_behind(Chain(), square)


# --- submodules of two names, states, ranks ---


def test_a_state_is_checked_whole():
    found = cut_behind(Chain(), square)
    state = found.to_dict()
    assert Cut.from_dict(state) == found
    module = dict(state["modules"][0])
    for wrong in (
        *(None, [], {}, {**state, "more": 1}, {**state, "deepest": "3"}, {**state, "deepest": True}),
        *({**state, "deepest": 4}, {**state, "needs": [[9]]}, {**state, "trainable": [True]}),
        *({**state, "modules": [{**module, "tap": None}] * 4}, {**state, "modules": [{"name": "layer1"}] * 4}),
        *({**state, "detaches": [0, 1, 1, 1]}, {**state, "modules": [{**module, "parameters": [1]}] * 4}),
    ):
        with pytest.raises(StateError):
            Cut.from_dict(wrong)


def test_ranks_agree_on_what_holds_for_all():
    found = cut_behind(Chain(), square)
    other = replace(found, needs=((0, 1),), detaches=(False, True, False, True), deepest=1, reason="here")
    both = Cut.combine([found, other])
    assert (both.needs, both.deepest, both.reason) == (((0, 1), (0, 1, 2, 3)), 1, "here")
    assert text_of(both.detaches) == "0101" and both.modules == found.modules
