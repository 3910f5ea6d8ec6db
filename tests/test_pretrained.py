"""Whether a model came trained, and what follows from it: how it is cut, and that it is frozen."""

import pytest
import torch
from torch import nn

import egeria
from egeria.model.cut import is_mostly_trained

WIDTH, STEPS = 16, 40


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Words(nn.Module):
    """A table, four blocks and a head: the shape of a language model."""

    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(50, WIDTH), nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens):
        return self.head(self.blocks(self.table(tokens)).mean(1))


def pretrained():
    """As it would come from a checkpoint: no weight of a normalisation layer is what it began as."""
    torch.manual_seed(0)
    model = Words()
    for block in model.blocks:
        nn.init.normal_(block.norm.weight, 1.0, 0.1)
    return model


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(WIDTH, affine=False), nn.RMSNorm(WIDTH)])
def test_norms_of_all_kinds_tell(norm):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, 2))
    assert not is_mostly_trained(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    model(torch.randn(8, WIDTH)).square().sum().backward()
    optimizer.step()
    assert is_mostly_trained(model)


def train(model, directory, **policy):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {"policy": policy, "plasticity": {"interval_steps": 1}}
    with egeria.attach(model, optimizer, total_steps=STEPS, config=config, directory=directory) as run:
        depths = []
        for _ in range(STEPS):
            loss = model(torch.randint(0, 50, (8, 6))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
            depths.append(run.frozen)
        return run, depths


def test_a_fine_tuning_freezes_its_table_first_and_one_after_the_other_late(tmp_path):
    run, depths = train(pretrained(), tmp_path)
    assert [module.name for module in run.modules][:2] == ["table", "blocks.0"]
    last = len(run.modules) - 1
    assert {depth: depths.index(depth) + 1 for depth in range(1, last)} == {
        depth: pytest.approx(STEPS * (0.8 + 0.2 * depth / last), abs=1) for depth in range(1, last)
    }


@pytest.mark.parametrize(
    ("make", "given", "freezes"), [(Words, "auto", False), (Words, True, True), (pretrained, False, False)]
)
def test_what_begins_at_random_is_not_frozen_and_a_setting_has_the_last_word(make, given, freezes, tmp_path):
    run, depths = train(make(), tmp_path, pretrained=given)
    assert bool(run.plan.moves) == bool(max(depths)) == freezes
    assert (run.modules[0].name == "table") == freezes, "it is cut as what it is taken for"
