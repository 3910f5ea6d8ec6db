"""What loops do besides a step: each is the same, to the bit, whether egeria froze the layers or their author did."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import egeria
from loops import FAST
from scripted import ScriptedController

STEPS = 40


def new_model():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(8, 2))


def one_dropout():
    """Return a model whose layers all use the same dropout."""
    torch.manual_seed(0)
    dropout = nn.Dropout(0.3)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), dropout, nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(8, 2))


class Plainly:
    """A loop with nothing besides."""

    def __init__(self, model):
        self.model = model
        self.optimizers = self.make_optimizers()

    def make_optimizers(self):
        return [torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)]

    def step(self, network, batch):
        """Train one step; return the loss."""
        loss = network(batch).square().mean()
        loss.backward()
        self.update()
        return loss

    def update(self):
        """Let the optimizers step, and begin anew."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def end(self):
        """Return all that training has changed."""
        return list(self.model.state_dict().values())


class Scaled(Plainly):
    """GradScaler with two optimizers, the first of which has nothing but what freezes."""

    def __init__(self, model):
        super().__init__(model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def make_optimizers(self):
        front, back = list(self.model[:2].parameters()), list(self.model[2:].parameters())
        return [torch.optim.SGD(front, lr=0.05, momentum=0.9), torch.optim.Adam(back, lr=0.01)]

    def step(self, network, batch):
        loss = network(batch).square().mean()
        self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        return loss


class Clipped(Plainly):
    """Gradients clipped by their norm and by value."""

    def update(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        nn.utils.clip_grad_value_(self.model.parameters(), 0.02)
        super().update()


class ZeroedInPlace(Plainly):
    """Gradients that are zeroed and never let go, with momentum and weight decay that would move what has one."""

    def update(self):
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class Averaged(Plainly):
    """A moving average of the weights, as `swa_utils` keeps it."""

    def __init__(self, model):
        super().__init__(model)
        self.average = swa_utils.AveragedModel(
            model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )

    def update(self):
        super().update()
        self.average.update_parameters(self.model)

    def end(self):
        return [*super().end(), *self.average.module.state_dict().values()]


class Grouped(Plainly):
    """Groups of parameters with rates of their own, and a schedule that moves momentum too."""

    def make_optimizers(self):
        groups = [{"params": self.model[0].parameters(), "lr": 0.01}, {"params": self.model[1:].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.01, 0.02], total_steps=STEPS + 1)
        return [optimizer]

    def update(self):
        super().update()
        self.scheduler.step()


class Accumulated(Plainly):
    """Three forward passes a step."""

    def step(self, network, batch):
        total = 0.0
        for part in batch.chunk(3):
            loss = network(part).square().mean() / 3
            loss.backward()
            total += loss.detach()
        self.update()
        return total


class Mixed(Plainly):
    """bf16 autocast around the forward pass."""

    def step(self, network, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = network(batch).float().square().mean()
        loss.backward()
        self.update()
        return loss


def batch(step):
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def with_egeria(aid, directory, make=new_model):
    """Train with egeria; return how many layers were frozen after each step, and the end."""
    loop = aid(make())
    config = {**FAST, "modules": {"pattern": r"\d"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", egeria.EgeriaWarning)
        run = egeria.attach(
            loop.model, loop.optimizers, config=config, controller=ScriptedController(), directory=directory
        )
    depths = []
    for step in range(STEPS):
        loop.model.train()
        run.step(loop.step(loop.model, batch(step)))
        depths.append(run.frozen)
    end = [tensor.clone() for tensor in loop.end()]
    run.close()
    return depths, end


def by_hand(aid, depths, make=new_model):
    """Train the same with layers frozen by the loop itself after the same steps."""
    loop = aid(make())
    for step in range(STEPS):
        loop.model.train()
        depth = depths[step - 1] if step else 0
        active = {part for layer in loop.model[depth:] for part in layer.modules()}
        for part in {part for layer in loop.model[:depth] for part in layer.modules()} - active:
            part.training = False
        loop.step(loop.model, batch(step))
        for place, layer in enumerate(loop.model):
            layer.requires_grad_(place >= depths[step])
            if place < depths[step]:
                layer.zero_grad()
    return loop.end()


AIDS = [Plainly, Scaled, Clipped, ZeroedInPlace, Averaged, Grouped, Accumulated, Mixed]


@pytest.mark.parametrize("aid", AIDS, ids=lambda aid: aid.__name__)
def test_it_goes_on_as_if_its_author_had_frozen_the_layers(aid, tmp_path):
    depths, ours = with_egeria(aid, tmp_path)
    assert depths[-1] >= 1 and len(set(depths)) >= 2
    assert all(torch.equal(*pair) for pair in zip(ours, by_hand(aid, depths), strict=True))


def test_an_optimizer_always_keeps_something_to_train(tmp_path):
    """`GradScaler.step` fails where no parameter of an optimizer has a gradient."""
    depths, _ = with_egeria(Scaled, tmp_path / "scaled")
    freely, _ = with_egeria(Plainly, tmp_path / "plainly")
    assert max(depths) == 1 < max(freely)


def test_a_dropout_that_active_layers_use_too_goes_on_dropping(tmp_path):
    depths, ours = with_egeria(Plainly, tmp_path, one_dropout)
    assert any(1 <= depth < 4 for depth in depths), "some layers that use it are frozen, and some are not"
    assert all(torch.equal(*pair) for pair in zip(ours, by_hand(Plainly, depths, one_dropout), strict=True))
