"""Freezing under torch.compile: every depth runs compiled, computes the same, and gives torch its settings back."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn

import egeria
from egeria.events import Declined
from egeria.model.compile import Compilation, is_compiled
from strays import Interrupter

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")]
LIMITS = ("recompile_limit", "accumulated_recompile_limit")
BLOCKS = 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))


class Chain(nn.Module):
    def __init__(self, blocks=BLOCKS, width=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Graphs:
    """A backend that counts what it compiles, and how often that runs."""

    def __init__(self):
        self.num_compiled = self.num_runs = 0

    def __call__(self, graph, inputs):
        compiled = torch._dynamo.backends.debugging.aot_eager(graph, inputs)
        self.num_compiled += 1

        def run(*args):
            self.num_runs += 1
            return compiled(*args)

        return run


def wrapped(model, graphs):
    return torch.compile(model, backend=graphs, fullgraph=True)


def in_place(model, graphs):
    model.compile(backend=graphs, fullgraph=True)
    return model


def block_by_block(model, graphs):
    for block in model.blocks:
        block.compile(backend=graphs, fullgraph=True)
    return model


def its_forward(model, graphs):
    model.forward = torch.compile(model.forward, backend=graphs, fullgraph=True)
    return model


WAYS = [wrapped, in_place, *(pytest.param(way, marks=pytest.mark.slow) for way in (block_by_block, its_forward))]


def settings():
    return [getattr(torch._dynamo.config, name) for name in LIMITS], torch._dynamo.eval_frame._stance


@pytest.fixture(autouse=True)
def _clean():
    """Graphs of one test are not those of another, and torch's settings are the user's own."""
    torch.compiler.reset()
    before = settings()
    yield
    assert settings() == before
    torch.compiler.reset()


def trained(way, plan, directory, num_steps=8):
    """Return losses, state, depths, and how many graphs were made and run by the end of each step."""
    torch.manual_seed(0)
    model, graphs = Chain(), Graphs()
    called = way(model, graphs) if way else model
    assert is_compiled(called) is (way is not None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = egeria.attach(called, optimizer, total_steps=10**6, plan=plan, directory=directory)  # each depth repays
    losses, depths, counts = [], [], []
    for step in range(num_steps):
        called.train()
        loss = called(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
        losses.append(loss.item())
        depths.append(run.frozen)
        counts.append((graphs.num_compiled, graphs.num_runs))
    run.close()
    return losses, model.state_dict(), depths, counts


@pytest.mark.parametrize("way", WAYS)
def test_every_depth_runs_compiled_and_as_uncompiled(way, tmp_path):
    plan = "step 2:2 step 4:0 step 5:2" if way is not wrapped else "step 1:1 step 2:2 step 4:3 step 5:0"
    with torch._dynamo.config.patch(recompile_limit=2):
        losses, state, depths, counts = trained(way, plan, tmp_path / "compiled")
    plain_losses, plain_state, plain_depths, _ = trained(None, plan, tmp_path / "plain")
    assert depths == plain_depths and len(set(depths)) == (4 if way is wrapped else 2)
    torch.testing.assert_close(losses, plain_losses, rtol=1e-4, atol=1e-5)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, plain_state[name], rtol=1e-3, atol=1e-5)
    per_pass = BLOCKS if way is block_by_block else 1
    assert [runs for _, runs in counts] == [per_pass * step for step in range(len(depths))], "it ran uncompiled"
    num_depths = len(set(depths))
    assert counts[-1][0] <= (2 * BLOCKS if way is block_by_block else num_depths), "a depth seen before was compiled"


def test_a_compiled_part_in_a_wrapper_is_seen():
    model = Chain(3)
    assert not is_compiled(model)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    assert is_compiled(nn.Sequential(model))


def test_the_users_own_stance_returns():
    for stance in ("default", "force_eager", "eager_on_recompile"):
        with torch.compiler.set_stance(stance):
            before, compilation = settings(), Compilation()
            for _ in range(2):
                compilation.wait()
                assert torch._dynamo.eval_frame._stance.stance == "force_eager"
            compilation.close()
            compilation.close()
            assert settings() == before


@pytest.mark.parametrize("which", ["wait", "begin", "close"])
def test_an_interrupt_at_any_line_leaves_torch_as_it_was(which):
    before, at = settings(), 1
    while True:
        compilation = Compilation()
        if which != "wait":
            compilation.wait()
        if which == "close":
            compilation.begin(3)
        with contextlib.suppress(KeyboardInterrupt), Interrupter(at) as tracer:
            {"wait": compilation.wait, "begin": partial(compilation.begin, 3), "close": compilation.close}[which]()
        compilation.close()
        assert settings() == before, at
        if tracer.count < at:
            break
        at += 1
    assert at > 3


def test_a_depth_has_to_repay_the_longest_compiling():
    compilation = Compilation()
    compilation.begin(3)
    assert compilation.look() == 0 and compilation.repays(0.0) is None
    model = torch.compile(Chain(3), backend="aot_eager")
    model(torch.randn(8, 6)).sum().backward()
    spent = compilation.look()
    assert spent > 0 and compilation.look() == 0
    assert compilation.repays(spent) is None
    assert "compiling took up to" in compilation.repays(spent / 2)
    compilation.close()


@pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning")
@pytest.mark.parametrize(
    ("way", "step"), [(wrapped, 0), (in_place, 0), (block_by_block, 0), (wrapped, 1), (in_place, 1)]
)
def test_a_model_that_is_compiled_behind_attach_goes_on_and_unfrozen_before_the_first_step(way, step, tmp_path):
    model, graphs = Chain(), Graphs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = egeria.attach(model, optimizer, total_steps=4, plan="0:2", directory=tmp_path)
    called = model
    for number in range(3):
        called = way(model, graphs) if number == step else called
        called(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        run.step(1.0)
    assert run.frozen == 2 * step
    run.close()
    declined = egeria.read_journal(tmp_path).of(Declined)
    assert step or "compiled after attach" in declined[0].reason
