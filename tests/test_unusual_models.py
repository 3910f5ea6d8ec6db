"""Models and loops that are unusual, and legitimate: they train as without us, and what cannot freeze is told."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint

import egeria
from egeria.events import Declined
from egeria.journal import read_journal

FAST = {"policy": {"name": "static"}, "plasticity": {"interval_steps": 2}}
pytestmark = pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")


class Part(nn.Module):
    """A residual block."""

    def __init__(self, width=8):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)

    def half(self, x):
        return self.outer(torch.relu(self.norm(self.inner(x))))

    def forward(self, x):
        return x + self.half(x)


class Chain(nn.Module):
    """Four blocks and a head."""

    def __init__(self, make=Part):
        super().__init__()
        self.parts = nn.ModuleList(make() for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.head(x)


def train(model, directory, *, steps=20, schedule="0.2:1", optimizer=None, step=None, **attach):
    """Train by `step(model, x)`, which returns the loss; return the run, still open, and what was declined."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    config = {**FAST, "policy": {"plan": schedule}}
    run = egeria.attach(model, optimizer, total_steps=steps, config=config, directory=directory, **attach)
    for index in range(steps):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(index))
        loss = model(x).square().mean() if step is None else step(model, x)
        if loss.requires_grad:
            loss.backward()
        for entry in optimizer if isinstance(optimizer, list) else [optimizer]:
            entry.step()
            entry.zero_grad()
        run.step(loss.detach())
    return run, [event.what + ": " + event.reason for event in read_journal(directory).of(Declined)]


class Halves(Part):
    """A block that recomputes its inside reentrantly."""

    def forward(self, x):
        return x + (checkpoint(self.half, x, use_reentrant=True) if self.training else self.half(x))


def test_reentrant_checkpointing_within_blocks_is_seen(tmp_path):
    model = Chain(Halves)
    run, declined = train(model, tmp_path, step=lambda model, x: model(x.requires_grad_()).square().mean())
    assert run.frozen == 0 and any("use_reentrant=False" in entry for entry in declined)
    assert all(parameter.requires_grad for parameter in model.parameters())


class LastHalves(Chain):
    """Recomputes the inside of its last block reentrantly."""

    def __init__(self):
        super().__init__()
        self.parts[3] = Halves()


def test_layers_in_front_of_what_is_recomputed_freeze(tmp_path):
    model = LastHalves()
    run, declined = train(model, tmp_path, schedule="0.2:2 0.4:4")
    assert run.frozen == 1 and any("use_reentrant=False" in entry for entry in declined), declined
    output = model(torch.randn(6, 8))
    output.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parts[3].parameters())


class Consistent(Chain):
    """Compares itself with its own output for another input, which is no target to learn from."""

    def forward(self, x):
        with torch.no_grad():
            wanted = super().forward(x + 0.1)
        return super().forward(x) - wanted


def test_a_pass_without_gradient_within_forward_is_no_checkpointing(tmp_path):
    run, declined = train(Consistent(), tmp_path)
    assert not any("checkpoint" in entry for entry in declined), declined
    run.close()


class Prototypes(Chain):
    """Ends in parameters that the model itself holds, as those of CLIP and ArcFace do."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(8))
        self.prototypes, self.scale = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.ones(()))
        del self.head

    def forward(self, x):
        x = x + self.token
        for part in self.parts:
            x = part(x)
        return self.scale * functional.linear(x, self.prototypes)


def test_parameters_of_the_model_itself_freeze_where_they_are_used(tmp_path):
    model = Prototypes()
    run, _ = train(model, tmp_path)
    assert run.frozen == 1
    assert model.prototypes.requires_grad and model.scale.requires_grad and not model.token.requires_grad
    assert not model.parts[0].inner.weight.requires_grad and model.parts[1].inner.weight.requires_grad


class Positions(Chain):
    """Adds positions in front, and has one dropout for both ends."""

    def __init__(self):
        super().__init__()
        self.position, self.drop = nn.Parameter(torch.zeros(8)), nn.Dropout(0.1)
        self.stem = nn.Linear(8, 8)

    def forward(self, x):
        x = self.drop(self.stem(x) + self.position)
        for part in self.parts:
            x = part(x)
        return self.head(self.drop(x))


def test_positions_freeze_with_the_front_where_both_ends_share_a_dropout(tmp_path):
    model = Positions()
    run, declined = train(model, tmp_path)
    assert run.frozen == 1 and not model.position.requires_grad and not declined, declined


class Contrastive(Chain):
    """Has the temperature of its loss, which the loop uses."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def test_a_parameter_of_the_loss_alone_trains_on(tmp_path):
    def step(model, x):
        found = model(x)
        leaf = found.detach().requires_grad_()
        (leaf * model.scale).square().mean().backward()
        found.backward(leaf.grad)
        return torch.zeros(())

    model = Contrastive()
    run, declined = train(model, tmp_path, step=step, schedule="0.2:2")
    assert run.frozen == 2 and model.scale.requires_grad, declined


class Tied(nn.Module):
    """Uses its table as the weight of its output, by no submodule."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.parts = nn.ModuleList(Part() for _ in range(4))

    def forward(self, x):
        y = self.table(x.argmax(dim=1))
        for part in self.parts:
            y = part(y)
        return functional.linear(y, self.table.weight)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_table_that_is_the_output_too_trains_on(enabled, tmp_path):
    model = Tied()

    def step(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return model(x).square().mean()

    run, _ = train(model, tmp_path, step=step)
    assert run.frozen == 1 and model.table.weight.requires_grad
    assert not model.parts[0].inner.weight.requires_grad


class Routed(Part):
    """A block that keeps a loss of its own for the model to add, as mixtures of experts do."""

    def forward(self, x):
        self.extra = self.inner(x).square().mean()
        return super().forward(x)


class Mixture(Chain):
    def __init__(self):
        super().__init__(Routed)

    def forward(self, x):
        return super().forward(x).square().mean() + sum(part.extra for part in self.parts)


def test_a_loss_that_blocks_keep_for_the_end_is_no_other_use_of_their_weights(tmp_path):
    model = Mixture()
    run, _ = train(model, tmp_path, step=lambda model, x: model(x))
    assert run.frozen == 1 and not any(entry.requires_grad for entry in model.parts[0].parameters())


class Uncalled(Chain):
    """Runs its blocks without calling them, so that no hook of theirs fires."""

    def forward(self, x):
        for part in self.parts:
            x = part.forward(x)
        return self.head.forward(x)


def test_layers_that_are_never_called_are_left_alone(tmp_path):
    model = Uncalled()
    for part in model.parts:
        part.inner, part.norm, part.outer = nn.Identity(), nn.Identity(), nn.Identity()
        part.weight = nn.Parameter(torch.eye(8))
        part.forward = lambda x, part=part: x @ part.weight
    run, declined = train(model, tmp_path)
    assert run.frozen == 0 and any(entry.startswith("freezing:") for entry in declined), declined
    assert all(parameter.requires_grad for parameter in model.parameters())


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class Players(nn.Module):
    """Two players of one class that are trained by losses of their own."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
        self.right = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))

    def forward(self, x):
        return Pair(self.left(x), self.right(x))


def test_a_player_is_not_frozen_where_outputs_come_in_an_object_of_the_loops_own(tmp_path):
    def step(model, x):
        step.turn = not step.turn
        output = model(x)
        return (output.left if step.turn else output.right).square().mean()

    step.turn = False
    model = Players()
    run, declined = train(model, tmp_path, schedule="0.2:1 0.4:2 0.6:3", step=step)
    assert any("a branch of its own" in entry for entry in declined) and run.frozen == 0
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_reason_is_told_where_an_optimizer_trains_the_front_alone(tmp_path):
    model = Chain()
    optimizers = [
        torch.optim.SGD(part.parameters(), lr=0.01) for part in (model.parts[0], nn.ModuleList(model.parts[1:]))
    ]
    optimizers.append(torch.optim.SGD(model.head.parameters(), lr=0.01))
    run, declined = train(model, tmp_path, schedule="0.2:3", optimizer=optimizers)
    assert run.frozen == 0 and any("one of the optimizers" in entry for entry in declined), declined


def test_an_optimizer_that_steps_by_the_buckets_of_the_wrapper_is_declined(tmp_path):
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer._overlap_with_ddp = True  # as ZeroRedundancyOptimizer has it
    run, declined = train(model, tmp_path, optimizer=optimizer)
    assert run.frozen == 0 and any("overlap_with_ddp" in entry for entry in declined), declined


def test_a_model_is_exported_while_layers_are_frozen(tmp_path):
    model = Chain()
    run, _ = train(model, tmp_path, loader=torch.utils.data.DataLoader(torch.randn(60, 8), batch_size=6))
    assert run.frozen == 1
    program = torch.export.export(copy.deepcopy(model).eval(), (torch.ones(6, 8),))
    mine = torch.export.export(model.eval(), (torch.ones(6, 8),))
    torch.testing.assert_close(mine.module()(torch.ones(6, 8)), program.module()(torch.ones(6, 8)))


def test_statistics_of_frozen_norms_can_be_made_anew(tmp_path):
    model = Chain()
    run, _ = train(model, tmp_path, schedule="0.2:2")
    assert run.frozen == 2
    xs = [torch.randn(6, 8, generator=torch.Generator().manual_seed(index)) for index in range(8)]
    update_bn(xs, model)
    assert [int(part.norm.num_batches_tracked) for part in model.parts] == [8] * 4
    model.train()(xs[0])
    assert [part.norm.training for part in model.parts] == [False, False, True, True]
    assert [int(part.norm.num_batches_tracked) for part in model.parts] == [8, 8, 9, 9]


def test_a_discriminator_whose_gradients_go_on_and_off_is_not_said_to_be_frozen(tmp_path):
    critic, made = Chain(), nn.Linear(8, 8)
    maker = torch.optim.SGD(made.parameters(), lr=0.01)

    def step(model, x):
        critic.requires_grad_(True)
        loss = (critic(x) - critic(made(x).detach())).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        critic.requires_grad_(False)
        critic(made(x)).square().mean().backward()
        maker.step()
        maker.zero_grad()
        return loss.detach()

    optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
    run, declined = train(critic, tmp_path, schedule="0.2:3", optimizer=optimizer, step=step)
    assert run.frozen == 0 and any("last word" in entry for entry in declined), declined


def test_a_loop_that_asks_for_gradients_of_parameters_is_not_stopped(tmp_path):
    def step(model, x):
        loss = model(x).square().mean()
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.grad = gradient
        return loss.detach()

    run, declined = train(Chain(), tmp_path, step=step)
    assert run.frozen == 0 and any("torch.autograd.grad" in entry for entry in declined), declined


def test_a_loop_that_asks_for_the_gradient_of_the_last_layer_freezes_what_is_in_front(tmp_path):
    def step(model, x):
        loss = model(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, [model.head.weight], retain_graph=True)
        return loss / (1 + gradient.norm().detach())

    run, declined = train(Chain(), tmp_path, step=step)
    assert run.frozen == 1 and not declined, declined


def test_a_backward_pass_for_the_weights_of_each_block_is_not_stopped(tmp_path):
    def step(model, x):
        for part in model.parts[1:]:
            (1e-3 * part.inner.weight.square().sum()).backward()
        return model(x).square().mean()

    run, declined = train(Chain(), tmp_path, schedule="0.2:1 0.4:3", step=step)
    assert run.frozen == 1 and any("backward pass of its own" in entry for entry in declined), declined


def test_modes_that_a_resumed_run_found_in_evaluation_follow_the_loop(tmp_path):
    trained = Chain()
    first, _ = train(trained, tmp_path / "first", schedule="0.2:2")
    state, weights = first.state_dict(), trained.state_dict()
    first.close()
    model = Chain().eval()
    model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {**FAST, "policy": {"plan": "0.2:2"}}
    run = egeria.attach(model, optimizer, total_steps=40, config=config, directory=tmp_path / "second")
    run.load_state_dict(state)
    assert run.frozen == 2
    model.train()
    model(torch.randn(6, 8)).square().mean().backward()
    assert not model.parts[0].norm.training
    run.close()
    assert all(module.training for module in model.modules())
