"""Models that know a submodule by two names, and weights that train on: what is called frozen is frozen."""

import pytest
import torch
from torch import nn

from egeria import attach, read_journal
from egeria.events import Declined

STATIC = {"policy": {"plan": "0.3:2 0.8:3"}}


def block(width_in, width):
    return nn.Sequential(nn.Conv2d(width_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


def chain():
    return nn.Sequential(
        *(block(3, 4), block(4, 4), block(4, 4), block(4, 4)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
    )


class Slices(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = chain()
        self.front, self.back = self.net[:2], self.net[2:]

    def forward(self, x):
        return self.back(self.front(x))


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.head = block(3, 4), block(4, 4), block(4, 4), nn.Linear(4, 2)
        self.all = nn.ModuleList([self.a, self.b, self.c])

    def forward(self, x):
        for part in self.all:
            x = part(x)
        return self.head(x.mean((2, 3)))


class BackToFront(nn.Module):
    """The second name of what runs last is defined ahead of what runs first."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.also = self.last
        self.a, self.b, self.c = block(3, 4), block(4, 4), block(4, 4)

    def forward(self, x):
        return self.also(self.c(self.b(self.a(x))).mean((2, 3)))


class _FabricModule(nn.Module):
    """Holds a model twice, as the wrapper of Lightning Fabric does."""

    def __init__(self):
        super().__init__()
        self._forward_module = chain()
        self._original_module = self._forward_module

    def forward(self, x):
        return self._forward_module(x).float()


def training(model, directory, steps=32, x=None, **options):
    """Train a model with a run, and give the run after each step."""
    torch.manual_seed(1)
    x = torch.randn(16, 3, 6, 6) if x is None else x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run = attach(model, optimizer, total_steps=steps, directory=directory, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        run.step(loss)
        yield run
    run.close()


@pytest.mark.parametrize("build", [Slices, Listed, BackToFront, _FabricModule])
def test_a_submodule_with_two_names_is_frozen_where_it_is_called_frozen(build, tmp_path):
    torch.manual_seed(0)
    model = build()
    total = sum(parameter.numel() for parameter in model.parameters())
    frozen = last = None
    for run in training(model, tmp_path, config=STATIC):
        if run.frozen and frozen is None:
            names = [name for module in run.modules[: run.frozen] for name in module.parameters]
            inner = model._forward_module if build is _FabricModule else model
            frozen = {name: inner.get_parameter(name).detach().clone() for name in names}
            last = next(reversed(list(inner.parameters()))) if build is not BackToFront else inner.last.weight
            before = last.detach().clone()
            share = run.summary().parameter_share
    assert {"a.0.weight", "net.0.0.weight", "0.0.weight"} & set(frozen)
    assert all(torch.equal(inner.get_parameter(name), value) for name, value in frozen.items())
    assert not torch.equal(before, last)
    assert share == pytest.approx(sum(map(torch.numel, frozen.values())) / total)
    assert read_journal(tmp_path).of(Declined) == []
