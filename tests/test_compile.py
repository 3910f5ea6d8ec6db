"""Training under torch.compile: every freeze goes on compiled, computes the same, and repays its compiling."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import egeria
from egeria import read_journal
from egeria.events import Declined, FaultCaught, FreezeWaits, ModuleFrozen, PlasticityRead, Recompiled, Thawed
from egeria.testing import ScriptedController
from loops import FAST
from ranks import run_ranks

pytestmark = pytest.mark.timeout(300)
BLOCKS, STEPS = 15, 165


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x):
        """Return [B, width]."""
        return x + torch.relu(self.norm(self.linear(x)))


class Chain(nn.Module):
    """Blocks in a row."""

    def __init__(self, blocks=BLOCKS, width=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        """Return [B, 2]."""
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


@pytest.fixture(autouse=True)
def _clean():
    """Graphs of one test are not those of another."""
    torch.compiler.reset()
    limits = torch._dynamo.config.recompile_limit
    yield
    assert torch._dynamo.config.recompile_limit == limits, "the limit is the user's own"
    torch.compiler.reset()


class Training:
    """A loop whose model is compiled one way or another."""

    def __init__(self, way, directory, **attach):
        torch.manual_seed(0)
        self.graphs = Graphs()
        self.model = Chain()
        given = torch.compile(self.model, backend=self.graphs) if way == "before" else self.model
        if way == "in place":
            self.model.compile(backend=self.graphs)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        config = {**FAST, "modules": {"pattern": r"blocks\.\d+|head"}, **attach.pop("config", {})}
        attach = {"controller": ScriptedController(), **attach}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", egeria.EgeriaWarning)
            self.run = egeria.attach(given, self.optimizer, config=config, directory=directory, **attach)
        self.called = given
        if way == "after":
            self.called = torch.compile(self.model, backend=self.graphs)
        elif way == "in place, after":
            self.model.compile(backend=self.graphs)
        self.data = torch.Generator().manual_seed(1)
        self.losses = []

    def step(self, count):
        for _ in range(count):
            self.called.train()
            loss = self.called(torch.randn(8, 6, generator=self.data)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", egeria.EgeriaWarning)
                self.run.step(loss)
            self.losses.append(loss.item())


WAYS = ["before", "in place", "after", "in place, after"]
"""To compile, before or after `attach`."""


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_fourteen_freezes_all_run_compiled_and_equal_to_eager(way, tmp_path):
    plain = Training("eager", tmp_path / "eager")
    compiled = Training(way, tmp_path / "compiled")
    plain.step(STEPS)
    frozen = []
    for _ in range(STEPS):
        runs = compiled.graphs.num_runs
        compiled.step(1)
        assert compiled.graphs.num_runs == runs + 1, "it ran uncompiled"
        frozen.append(compiled.run.frozen)
    assert frozen[-1] == plain.run.frozen == BLOCKS
    assert sorted(set(frozen)) == list(range(BLOCKS + 1)), "one by one"
    torch.testing.assert_close(compiled.losses, plain.losses, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(compiled.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert compiled.graphs.num_compiled <= BLOCKS + 2
    journal = read_journal(tmp_path / "compiled")
    told = [event for event in journal.of(Recompiled) if event.by_freezing]
    assert len(told) == BLOCKS
    assert all(event.wall_s > 0 for event in told)
    assert not journal.of(FaultCaught) and not journal.of(Declined)
    compiled.run.close()
    plain.run.close()


@pytest.mark.parametrize("way", ["before", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])])
def test_statistics_of_frozen_layers_stay_though_the_loop_calls_train(way, tmp_path):
    loop = Training(way, tmp_path)
    loop.step(60)
    depth = loop.run.frozen
    assert 0 < depth < BLOCKS
    before = [buffer.clone() for block in loop.model.blocks[:depth] for buffer in block.norm.buffers()]
    loop.model.train()
    loop.step(3)
    after = [buffer for block in loop.model.blocks[:depth] for buffer in block.norm.buffers()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    loop.run.close()


def test_readings_and_order_come_from_passes_of_their_own(tmp_path):
    loop = Training("in place", tmp_path, controller="inline")
    loop.step(30)
    loop.run.close()
    journal = read_journal(tmp_path)
    assert len(journal.of(PlasticityRead)) > 8 and not journal.of(FaultCaught)
    assert loop.graphs.num_compiled <= 2 + len(journal.of(ModuleFrozen))
    assert not journal.of(Declined)


def test_a_thaw_goes_back_to_graphs_that_are_there(tmp_path):
    loop = Training("in place", tmp_path)
    loop.step(40)
    compiled, depth = loop.graphs.num_compiled, loop.run.frozen
    for group in loop.optimizer.param_groups:
        group["lr"] /= 20
    loop.step(1)
    while loop.run.frozen:
        loop.step(1)
    thawed = loop.graphs.num_compiled
    loop.step(2)
    assert depth and read_journal(tmp_path).of(Thawed)
    assert loop.graphs.num_compiled == thawed <= compiled + 1
    loop.run.close()


def test_a_freeze_that_cannot_repay_its_compiling_waits(tmp_path):
    loop = Training("in place", tmp_path, total_steps=100, config={"policy": {"name": "linear", "start": 0.2}})
    loop.step(100)
    runs, frozen = loop.graphs.num_compiled, loop.run.frozen
    loop.run.close()
    journal = read_journal(tmp_path)
    waiting = journal.of(FreezeWaits)
    assert waiting and frozen == 0 and not journal.of(ModuleFrozen), "no freeze of a model this small repays seconds"
    assert "compiling anew took up to" in waiting[0].reason
    assert runs <= 2


def test_what_waits_survives_a_resume(tmp_path):
    attach = {"total_steps": 100, "config": {"policy": {"name": "linear", "start": 0.2}}}
    first = Training("in place", tmp_path / "first", **attach)
    first.step(50)
    state = first.run.state_dict()
    first.run.close()
    second = Training("in place", tmp_path / "second", **attach)
    second.model.load_state_dict(first.model.state_dict())
    second.run.load_state_dict(state)
    assert second.run.frozen == 0
    second.step(10)
    assert not read_journal(tmp_path / "second").of(FaultCaught)
    second.run.close()


def test_a_part_wrapped_by_compile_is_refused_with_a_way_out(tmp_path):
    model = Chain(4)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(egeria.EgeriaWarning, match=r"part\.compile\(\)"):
        run = egeria.attach(model, optimizer, config=FAST, directory=tmp_path)
    assert run.modules == ()
    run.close()


# --- replicas ------------------------------------------------------------------------------------


def train_replica(way):
    """Return how often it froze, the weights, what failed, and how many graphs there were."""
    # With it each bucket is a graph of its own, and so is what is reduced.
    with torch._dynamo.config.patch(optimize_ddp=False):
        return _train_replica(way)


def _train_replica(way):
    torch.manual_seed(0)
    model, graphs = Chain(4), Graphs()
    given = model
    if way == "in place":
        model.compile(backend=graphs)
        given = DistributedDataParallel(model)
    elif way == "wrapper":
        given = torch.compile(DistributedDataParallel(model), backend=graphs)
    elif way == "inside":
        given = DistributedDataParallel(torch.compile(model, backend=graphs))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {**FAST, "modules": {"pattern": r"blocks\.\d+|head"}}
    rank = distributed.get_rank()
    data = torch.Generator().manual_seed(rank)
    run = egeria.attach(given, optimizer, config=config, controller=ScriptedController(), directory=f"{way}{rank}")
    for _ in range(40):
        loss = given(torch.randn(8, 6, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    frozen = run.frozen
    run.close()
    recent = run._recorder.recent
    told = [f"{event}" for event in recent if isinstance(event, (FaultCaught, Declined))]
    return frozen, [p.detach().clone() for p in model.parameters()], told, graphs.num_compiled


@pytest.mark.dist
@pytest.mark.parametrize(
    "way", ["in place", *(pytest.param(way, marks=pytest.mark.slow) for way in ("wrapper", "inside"))]
)
def test_compiled_replicas_freeze_alike(way):
    (frozen, first, told, graphs), (also, second, *_) = run_ranks(train_replica, way)
    assert frozen == also == 3 and told == [] and graphs >= 4
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_a_compiled_container_of_torch_is_followed_too(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)], nn.Linear(6, 2))
    compiled, optimizer = torch.compile(model, backend="eager"), torch.optim.SGD(model.parameters(), lr=0.05)
    options = {"config": FAST, "controller": ScriptedController(), "directory": tmp_path}
    with egeria.attach(compiled, optimizer, **options) as run:
        while not run.frozen:
            loss = compiled(torch.randn(8, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
        assert run._session.clock.step < 60
    assert not compiled._forward_pre_hooks and not model._forward_pre_hooks


def test_the_cache_is_declined(tmp_path):
    data = TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(0)))
    loader = DataLoader(data, batch_size=8)
    model = Chain()
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.warns(egeria.EgeriaWarning, match="the model is compiled, and its graphs have the whole forward pass"):
        egeria.attach(
            model, optimizer, loader, total_steps=9, config={"cache": {"enabled": True}}, directory=tmp_path
        ).close()
