"""`egeria.advise`: it changes nothing, and what it foretells is what a run saves."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import itertools
import json
import random
import time
import weakref
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import egeria
from egeria import advise
from egeria.errors import ConfigError
from loops import Loop, differences, outside
from menagerie import each_supported

BACKWARD_S, FORWARD_S, BLOCK_S, NUM_BLOCKS = 0.01, 0.016, 0.001, 4
PLAIN_S = FORWARD_S + NUM_BLOCKS * (BLOCK_S + BACKWARD_S)


class Clock:
    """Stands still but where the toy below spends time, so that what is measured is known."""

    now_s = 0.0

    def perf_counter(self):
        return self.now_s

    def process_time(self):
        return self.now_s


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("egeria.advice.instruments.time", CLOCK)
    monkeypatch.setattr("egeria.advice.source.time", CLOCK)


# It changes nothing


@each_supported
def test_a_training_that_asked_for_advice_goes_on_to_the_bit_as_one_that_did_not(specimen):
    plain, asking = Loop(specimen), Loop(specimen)
    for loop in (plain, asking):
        loop.step(3)
    before, data = outside(asking.model), torch.Generator().manual_seed(9)
    batches = [specimen.example(data) for _ in range(3)]

    def loss(model, batch):
        CLOCK.now_s += FORWARD_S
        args, kwargs = batch
        return specimen.loss(model(*args, **kwargs))

    advice = advise(asking.model, asking.optimizer, batches, loss=loss, rounds=1)
    assert advice.costs[0].iteration_s > 0
    assert outside(asking.model) == before
    for loop in (plain, asking):
        loop.step(3)
    assert differences(plain.everything(), asking.everything()) == []


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        CLOCK.now_s += BLOCK_S
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        CLOCK.now_s += BACKWARD_S
        return gradient


class Block(nn.Module):
    """Its forward pass takes one millisecond of the clock, its backward pass ten."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Slow.apply(self.linear(x))


class Noisy(Dataset):
    """Draws a random number for each sample, as augmentation does."""

    def __len__(self):
        return 40

    def __getitem__(self, place):
        return torch.randn(8) + place + random.random() + np.random.rand(), place % 2


class Drawing(Noisy):
    """Draws from generators of its own."""

    def __init__(self):
        self.own = torch.Generator().manual_seed(3)
        self.transforms = [random.Random(3), {"numpy": np.random.default_rng(3)}, np.random.RandomState(3)]

    def __getitem__(self, place):
        first, second, third = self.transforms
        drawn = first.random() + second["numpy"].random() + third.rand()
        return torch.randn(8, generator=self.own) + drawn, place % 2


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.Linear(8, 2))


def samples(count=40):
    return TensorDataset(torch.randn(count, 8, generator=torch.Generator().manual_seed(0)), torch.arange(count) % 2)


def loss(model, batch):
    CLOCK.now_s += FORWARD_S
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def ask(model=None, loader=None, **more):
    model = blocks() if model is None else model
    loader = DataLoader(samples(), batch_size=4) if loader is None else loader
    return advise(model, sgd(model), loader, **{"loss": loss, "rounds": 2, **more})


def random_numbers():
    return torch.rand(3).tolist(), random.random(), np.random.rand()


@pytest.mark.parametrize("generator", [None, torch.Generator])
@pytest.mark.parametrize("dataset", [samples, Noisy, Drawing])
def test_random_numbers_and_the_order_of_the_loader_stay(generator, dataset):
    def course(asks):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        own = None if generator is None else generator().manual_seed(5)
        data = dataset()
        loader = DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=own))
        first, model = [batch[0].tolist() for batch in loader], nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        if asks:
            ask(model, loader, rounds=1)
        return first, [batch[0].tolist() for batch in loader], random_numbers()

    assert course(asks=True) == course(asks=False)


def test_what_a_scheduler_made_of_the_optimizer_steps_the_copy_alone():
    model = blocks().eval()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces `step` of its optimizer
    before = {name: value.clone() for name, value in model.state_dict().items()}
    advice = advise(model, optimizer, DataLoader(samples(), batch_size=4), loss=loss, rounds=1)
    assert len(advice.costs) == NUM_BLOCKS + 1 and not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state and scheduler.last_epoch == 0


@pytest.mark.parametrize("place", [0, 5])
def test_where_it_fails_everything_stays_as_well(place):
    calls = itertools.count()

    def failing(model, batch):
        torch.rand(1), random.random(), np.random.rand()
        if next(calls) == place:
            raise ValueError("a fault of the loop")
        return loss(model, batch)

    model = blocks()
    before, numbers = outside(model), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    with pytest.raises(ConfigError, match="a fault of the loop"):
        ask(model, loss=failing)
    assert outside(model) == before
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == numbers[1:]


# What it foretells


def test_what_a_schedule_would_save_is_the_time_that_its_frozen_modules_take():
    advice = ask()
    assert advice.costs[0].iteration_s == pytest.approx(PLAIN_S)
    for schedule, num_skipped in (("0.5:2", 1.0), ("0:4", 4.0), ("0.25:1 0.5:3 0.75:0", 0.25 + 0.75)):
        assert advice.saving(schedule) == pytest.approx(num_skipped * BACKWARD_S / PLAIN_S)
    assert advice.saving("0.5:2", cached=True) == pytest.approx((BACKWARD_S + BLOCK_S) / PLAIN_S)
    assert [cost.depth for cost in advice.costs] == list(range(NUM_BLOCKS + 1))
    assert advice.is_worth_it and "Worth a try" in repr(advice)


class Stamped:
    """An event in a queue that runs on a clock of its own, the one of the toy."""

    log: ClassVar[list[str]] = []

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = CLOCK.now_s
        self.log.append("record")

    def synchronize(self):
        self.log.append("wait")

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


def test_on_an_accelerator_nothing_waits_for_it_between_iterations(monkeypatch):
    """To wait makes iterations longer than they are in the loop, and the share that a freeze saves smaller."""
    expected = ask()
    Stamped.log.clear()
    monkeypatch.setattr(torch.cuda, "Event", Stamped)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    for module in ("measure", "rehearsal"):
        monkeypatch.setattr(f"egeria.advice.{module}.devices_of", lambda _: [0])
    found = ask()
    assert [cost.iteration_s for cost in found.costs] == pytest.approx([cost.iteration_s for cost in expected.costs])
    assert [cost.prefix_s for cost in found.costs] == pytest.approx([cost.prefix_s for cost in expected.costs])
    first_wait = Stamped.log.index("wait")
    assert first_wait > 4 * found.num_iterations and "record" not in Stamped.log[first_wait:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")
def test_an_accelerator_is_measured(monkeypatch):
    monkeypatch.setattr("egeria.advice.instruments.time", time)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(8))).cuda()
    batches = [torch.randn(4096, 2048, device="cuda") for _ in range(4)]
    advice = advise(model, sgd(model), batches, loss=lambda model, batch: model(batch).square().mean())
    first, last = advice.costs[0], advice.costs[-1]
    assert 0 < last.iteration_s < 0.8 * first.iteration_s
    assert 0 < last.peak_bytes < first.peak_bytes
    assert 0 < last.prefix_s < last.forward_s


class Words(nn.Module):
    """A table and blocks with normalisation, which are layer modules in pairs unless they were trained."""

    def __init__(self):
        super().__init__()
        block = (nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU())
        self.table, self.blocks = (
            nn.Embedding(40, 16),
            nn.Sequential(*(nn.Sequential(*copy.deepcopy(block)) for _ in range(8))),
        )
        self.head = nn.Linear(16, 2)

    def forward(self, tokens):
        return self.head(self.blocks(self.table(tokens)).mean(1))


@pytest.mark.parametrize("is_trained", [False, True])
def test_what_freezes_is_what_it_names_though_the_copy_is_soon_a_trained_model(is_trained):
    torch.manual_seed(0)
    model = Words()
    if is_trained:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.5, 1.5)
    batches = [(torch.randint(0, 10, (8, 6)), torch.randint(0, 2, (8,))) for _ in range(3)]
    found = advise(model, sgd(model), batches, loss=loss)
    with egeria.attach(model, sgd(model), total_steps=10, controller="inline") as run:
        modules = run.modules
    assert found.modules == tuple(module.name for module in modules)
    assert ("blocks.0" in found.modules) is is_trained
    sizes = [sum(model.get_parameter(name).numel() for name in module.parameters) for module in modules]
    assert [cost.gradient_bytes for cost in found.costs] == [4 * sum(sizes[cost.depth :]) for cost in found.costs]


def test_evaluations_make_the_share_that_is_saved_smaller():
    def evaluate(_model):
        CLOCK.now_s += 10 * PLAIN_S  # as long as the iterations to the next

    advice = ask(evaluate=evaluate, iterations_per_evaluation=10)
    assert advice.saving("0:4") == pytest.approx(ask().saving("0:4") / 2)
    assert advice.verdict.split("iteration takes")[1].split("less")[0] in ask().verdict


def test_memory_is_that_of_gradients_optimizer_state_and_what_is_kept_for_the_backward_pass():
    advice = ask()
    first, last = advice.costs[0], advice.costs[-1]
    per_block, head = (8 * 8 + 8) * 4, (8 * 2 + 2) * 4
    assert first.gradient_bytes == NUM_BLOCKS * per_block + head and last.gradient_bytes == head
    assert first.optimizer_bytes == last.optimizer_bytes == first.gradient_bytes  # momentum, which a freeze keeps
    assert first.activation_bytes > last.activation_bytes > 0
    batches = [(torch.randn(size, 8), torch.arange(size) % 2) for size in (4, 40, 8)]  # counted on the same, each
    kept = [cost.activation_bytes for cost in ask(loader=batches).costs]
    assert kept == sorted(kept, reverse=True)


def test_a_tied_weight_that_trains_on_keeps_its_gradient_and_state():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(40, 8), nn.Embedding(8, 8)

        def forward(self, x):
            return self.words(x) + self.places(torch.arange(len(x)))

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.blocks = Words(), nn.Sequential(Block(), Block())
            self.head = nn.Linear(8, 40, bias=False)
            self.head.weight = self.front.words.weight

        def forward(self, x):
            return self.head(self.blocks(self.front(x)))

    words = torch.arange(8)
    advice = ask(Tied(), [(words, words)] * 2)
    tied, places, block = 40 * 8 * 4, 8 * 8 * 4, (8 * 8 + 8) * 4
    by_depth = {cost.depth: cost.gradient_bytes for cost in advice.costs}
    assert by_depth[0] == tied + places + 2 * block
    assert by_depth[1] == tied + 2 * block
    assert min(by_depth.values()) >= tied


def test_each_depth_is_timed_with_the_same_batches():
    """Batches may differ in size: what is dear about a batch must not pass for what is dear about a depth."""

    class Light(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x)

    costs = itertools.cycle([1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0])
    batches = [(torch.randn(4, 8), torch.arange(4) % 2, cost) for cost, _ in zip(costs, range(8), strict=False)]

    def dear(model, batch):
        CLOCK.now_s += batch[2]
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    advice = ask(nn.Sequential(*(Light() for _ in range(9)), nn.Linear(8, 2)), batches, loss=dear)
    assert len(advice.costs) >= 6
    assert len({round(cost.iteration_s, 9) for cost in advice.costs}) == 1


def test_the_frozen_forward_pass_is_that_of_the_model_in_each_call_of_an_iteration():
    def twice(model, batch):
        CLOCK.now_s += FORWARD_S  # no part of the model: a cache would not save it
        first, second = model(batch[0]), model(batch[0])
        CLOCK.now_s += FORWARD_S
        return nn.functional.cross_entropy(first + second, batch[1])

    prefixes = {cost.depth: cost.prefix_s for cost in ask(loss=twice).costs}
    assert prefixes == {depth: pytest.approx(2 * depth * BLOCK_S) for depth in range(NUM_BLOCKS + 1)}


def test_what_a_checkpoint_computes_again_is_no_second_forward_pass():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(NUM_BLOCKS)), nn.Linear(8, 2)

        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    advice = ask(Checkpointed())
    prefixes = {cost.depth: cost.prefix_s for cost in advice.costs}
    assert prefixes == {depth: pytest.approx(depth * BLOCK_S) for depth in range(NUM_BLOCKS + 1)}
    kept = [cost.activation_bytes for cost in advice.costs]
    assert kept == sorted(kept, reverse=True)


def test_nothing_of_the_copy_is_left_behind():
    copies = []

    def remembering(model, batch):
        copies.append(weakref.ref(model))
        output = torch.sigmoid(model(batch[0]))
        copies.append(weakref.ref(output))
        return loss(model, batch)  # without that output: no backward pass goes through it

    gc.disable()
    try:
        ask(loss=remembering)
    finally:
        gc.enable()
    assert copies
    assert not any(reference() is not None for reference in copies)


def test_a_loss_may_take_its_batch_apart():
    batches = [{"x": torch.randn(4, 8), "labels": torch.arange(4) % 2} for _ in range(2)]

    def popping(model, batch):
        labels = batch.pop("labels")
        return nn.functional.cross_entropy(model(batch["x"]), labels)

    assert len(ask(loader=batches, loss=popping).costs) == NUM_BLOCKS + 1
    assert all("labels" in batch for batch in batches)


class TestTheOriginal:
    def test_a_criterion_with_parameters_of_its_own_is_refused_and_stays_as_it_was(self):
        model, criterion = blocks(), nn.Linear(2, 2)
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        criterion.weight.grad = gradient = torch.ones(2, 2)
        with pytest.raises(ConfigError, match="part of the model"):
            advise(
                model,
                optimizer,
                DataLoader(samples(), batch_size=4),
                loss=lambda model, batch: nn.functional.cross_entropy(criterion(model(batch[0])), batch[1]),
            )
        assert criterion.weight.grad is gradient
        assert torch.equal(gradient, torch.ones(2, 2))
        assert criterion.bias.grad is None

    def test_a_loss_that_calls_the_original_is_refused_and_the_original_stays_as_it_was(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ConfigError, match="Use the model that loss is given"):
            ask(model, loss=lambda _, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_parts_in_inference_mode_stay_so_on_the_copy(self):
        model, modes = blocks(), set()
        model.insert(1, nn.BatchNorm1d(8).eval())

        def looking(twin, batch):
            modes.add(twin[1].training)
            return loss(twin, batch)

        ask(model, loss=looking)
        assert modes == {False}


class Clever(torch.optim.SGD):
    """Has an attribute that torch's own way of copying optimizers leaves out."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01)
        self.factor = 0.5

    def step(self, closure=None):
        self.param_groups[0]["lr"] *= self.factor
        return super().step(closure)


def test_attributes_of_an_optimizer_are_copied_too():
    model = blocks()
    advice = advise(model, Clever(model.parameters()), DataLoader(samples(), batch_size=4), loss=loss, rounds=1)
    assert len(advice.costs) == NUM_BLOCKS + 1


def test_settings_may_be_objects():
    settings = egeria.Config.from_dict({"policy": {"name": lambda config, **facts: None}})
    assert len(ask(config=settings).costs) == NUM_BLOCKS + 1


def test_what_cannot_be_counted_is_not_known_but_timed():
    def functional(model, batch):
        gradient = torch.func.grad(lambda x: model(x).sum())(batch[0])
        return nn.functional.cross_entropy(model(batch[0] + gradient), batch[1])

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 2))
    CLOCK.now_s += 1.0

    def timed(model, batch):
        CLOCK.now_s += FORWARD_S
        return functional(model, batch)

    advice = ask(model, loss=timed)
    assert {cost.activation_bytes for cost in advice.costs} == {None}
    assert repr(advice)


def test_a_sparse_buffer_is_no_trouble():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("adjacency", torch.eye(4).to_sparse())
            self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.blocks(torch.sparse.mm(self.adjacency, x)))

    assert ask(Graph()).costs[0].activation_bytes > 0


def test_a_cache_takes_as_much_as_the_largest_of_what_fronts_put_out():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow, self.head = nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.narrow(self.wide(x)))

    def timed(model, batch):
        CLOCK.now_s += FORWARD_S
        return loss(model, batch)

    (note,) = [note for note in ask(Wide(), loss=timed).notes() if "cache can work" in note]
    assert f"{40 * 64 * 4 / 2**20:,.1f} MiB" in note


class SlowToRead(Noisy):
    """A batch of four takes as long as three iterations."""

    def __getitem__(self, place):
        CLOCK.now_s += 3 * PLAIN_S / 4
        return super().__getitem__(place)


@pytest.mark.parametrize(("num_workers", "share"), [(0, 0.25), (2, 1.0)])
def test_a_loader_that_takes_long_is_told_and_counts_where_nobody_reads_meanwhile(num_workers, share):
    advice = ask(loader=DataLoader(SlowToRead(), batch_size=4, num_workers=num_workers))
    assert advice.saving("0:4") == pytest.approx(share * ask().saving("0:4"))
    (note,) = [note for note in advice.notes() if "Reading a batch" in note]
    assert ("Workers of the loader would hide it" in note) is (num_workers == 0)
    assert not any("Reading a batch" in note for note in ask().notes())


class Bound:
    """Puts batches together with a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def collate(self, drawn):
        noise = self.rng.random()
        return torch.stack([entry[0] + noise for entry in drawn]), torch.tensor([entry[1] for entry in drawn])


def collate_with(drawn, rng):
    noise = rng.random()
    return torch.stack([entry[0] + noise for entry in drawn]), torch.tensor([entry[1] for entry in drawn])


class Slotted:
    __slots__ = ("rng",)

    def __init__(self, rng):
        self.rng = rng

    def __call__(self, drawn):
        return collate_with(drawn, self.rng)


def closure_over(rng):
    def collate(drawn):
        return collate_with(drawn, rng)

    return collate


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: functools.partial(collate_with, rng=rng),
        closure_over,
        Slotted,
        lambda rng: (bound := Bound(), setattr(bound, "rng", rng))[0].collate,
    ],
    ids=["partial", "closure", "slots", "method"],
)
def test_generators_of_what_puts_batches_together_stay(make):
    rng = np.random.default_rng(0)
    ask(loader=DataLoader(samples(), batch_size=4, collate_fn=make(rng)))
    assert rng.random() == np.random.default_rng(0).random()


def test_generators_deep_in_a_data_set_and_in_the_loss_stay():
    own, mixing = torch.Generator().manual_seed(3), random.Random(3)
    before = own.get_state(), mixing.getstate()
    drawing = Drawing()
    drawing.own, drawing.transforms[0] = own, mixing
    subset = torch.utils.data.Subset(
        torch.utils.data.Subset(torch.utils.data.Subset(drawing, range(40)), range(40)), range(40)
    )

    def mixed(model, batch):
        mixing.random()
        return loss(model, batch)

    ask(loader=DataLoader(subset, batch_size=4), loss=mixed)
    assert torch.equal(own.get_state(), before[0])
    assert mixing.getstate() == before[1]


def test_generators_stay_where_an_evaluation_holds_a_large_model_too():
    other, mixing = nn.Sequential(*(blocks() for _ in range(20))), random.Random(3)
    holder = SimpleNamespace(mixing=mixing)
    for _ in range(4):
        holder = SimpleNamespace(inner=holder)
    before, drawn = mixing.getstate(), []

    def evaluate(model):
        drawn.append((other, holder.inner.inner.inner.inner.mixing.random()))

    ask(evaluate=evaluate, iterations_per_evaluation=5)
    assert drawn and mixing.getstate() == before


class Tossing(Noisy):
    """Draws by whatever it is given, which leads to a generator."""

    def __init__(self, draws):
        self.draws = draws

    def __getitem__(self, place):
        return torch.randn(8) + self.draws(), place % 2


def deep(rng, edges):
    def wrapped(draw):
        return lambda: draw()  # noqa: PLW0108 - one cell more

    draw = functools.partial(random.Random.random, rng)
    for _ in range(edges):
        draw = wrapped(draw)
    return draw


class Holding:
    """Draws by one of the generators in a container."""

    def __init__(self, held):
        self.held = held

    def __call__(self):
        return self.held[1].random()


def with_attribute(rng):
    def draw():
        return draw.rng.random()

    draw.rng = rng
    return draw


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: rng.random,
        with_attribute,
        functools.partial(deep, edges=7),
        lambda rng: Holding(collections.defaultdict(random.Random, {1: rng})),
        lambda rng: Holding({1: rng, "1": random.Random(0)}),
        lambda rng: Holding([random.Random(0), rng] * 40),
    ],
    ids=["method", "attribute", "depth", "defaultdict", "like names", "long list"],
)
def test_generators_stay_however_a_data_set_holds_them(make):
    rng = random.Random(3)
    before = rng.getstate()
    dataset = Tossing(make(rng))
    dataset[0]
    assert rng.getstate() != before
    before = rng.getstate()
    ask(loader=DataLoader(dataset, batch_size=4), rounds=1)
    assert rng.getstate() == before


class Given(Dataset):
    """Gives whatever a function makes of a place."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 40

    def __getitem__(self, place):
        return self.make(place)


def collate_zeros(drawn):
    return torch.zeros(len(drawn), 8), torch.zeros(len(drawn), dtype=torch.long)


class Opaque:
    pass


@pytest.mark.parametrize(
    ("make", "repeats"),
    [
        (lambda place: torch.tensor([float("nan"), place]), True),
        (lambda place: {"a": [np.arange(place), "text"], "b": float("nan")}, True),
        (lambda place: np.random.rand(np.random.randint(1, 90)), False),
        (lambda place: torch.ones(2).flip(0) * (1 if random.random() < 0.5 else -1), False),
        (lambda place: Opaque(), None),
    ],
    ids=["nan", "nested", "ragged", "flips", "opaque"],
)
def test_samples_of_any_kind_are_compared(make, repeats):
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    assert ask(loader=DataLoader(Given(make), batch_size=4, collate_fn=collate_zeros)).repeats is repeats


def test_batches_that_the_model_overwrites_stay_as_they_were():
    batches = [(torch.ones(4, 8), torch.zeros(4, dtype=torch.long))]
    ask(loader=batches, loss=lambda model, batch: loss(model, (batch[0].mul_(2), batch[1])))
    assert torch.equal(batches[0][0], torch.ones(4, 8))


def test_settings_that_keep_a_run_from_freezing_at_once_do_not_count():
    advice = ask(config={"freezing": {"enabled": False}})
    assert advice.costs[-1].depth == NUM_BLOCKS


def test_what_runs_on_the_copy_is_no_news(caplog):
    with caplog.at_level("INFO", logger="egeria"):
        ask()
    assert not caplog.records


def test_a_model_of_hugging_face_needs_no_loss():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, vocab_size=30, num_labels=2
    )
    model = transformers.BertForSequenceClassification(config)
    words = torch.randint(1, 30, (4, 6))
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.tensor([0, 1, 0, 1])}
    advice = advise(model, torch.optim.AdamW(model.parameters()), [batch] * 3, rounds=1)
    assert advice.modules[0] and len(advice.costs) >= 3


def test_it_tells_whether_a_cache_can_work():
    same, other = ask(), ask(loader=DataLoader(Noisy(), batch_size=4))
    assert same.repeats is True and other.repeats is False
    assert same.costs[1].stored_bytes == 8 * 4 and same.num_samples == 40
    assert any("No cache" in note for note in other.notes())
    assert ask(loader=[next(iter(DataLoader(samples(), batch_size=4)))]).repeats is None


def test_it_says_no_where_freezing_saves_nothing():
    class Heavy(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.behind, self.head = nn.Linear(8, 8), nn.Linear(8, 8), Block()

        def forward(self, x):
            return self.head(self.behind(self.front(x)))

    advice = ask(Heavy())
    assert not advice.is_worth_it and advice.verdict.startswith("Not worth it")


def test_it_says_what_stands_in_the_way():
    class Lone(nn.Module):
        def __init__(self):
            super().__init__()
            self.only = nn.Linear(8, 2)

        def forward(self, x):
            return self.only(x)

    advice = ask(Lone())
    assert advice.costs[-1].depth == 0 and "nothing can freeze" in advice.verdict
    assert repr(advice).count("at least two layers") == 1


def test_it_is_shown_as_text_html_and_json():
    advice = ask(rounds=1)
    assert len(repr(advice).splitlines()) >= NUM_BLOCKS + 3
    assert advice._repr_html_().count("<tr>") == NUM_BLOCKS + 2
    found = json.loads(advice.to_json())
    assert found["is_worth_it"] is True and len(found["costs"]) == NUM_BLOCKS + 1
    assert egeria.Advice is type(advice)


class Stream(IterableDataset):
    def __init__(self):
        self.place = 0

    def __iter__(self):
        while True:
            self.place += 1
            yield torch.randn(8), self.place % 2


def test_a_stream_is_read_on_a_copy():
    stream = Stream()
    advice = ask(loader=DataLoader(stream, batch_size=4))
    assert stream.place == 0 and advice.num_samples is None and advice.repeats is None


class Whole(Dataset):
    """Gives samples only in batches, and has no length; `as_batches` gives batches that are put together already."""

    def __init__(self, as_batches=False):
        self.data, self.as_batches = samples(), as_batches

    def __getitems__(self, places):
        return [self.data[place] for place in places]

    def __getitem__(self, places):
        if not self.as_batches:
            raise NotImplementedError
        return torch.stack([self.data[place][0] for place in places]), torch.tensor([place % 2 for place in places])


class Measured(Whole):
    def __len__(self):
        return len(self.data)


@pytest.mark.parametrize(("dataset", "repeats"), [(Whole, None), (Measured, True)])
def test_a_data_set_may_give_samples_in_batches_only_and_need_not_know_its_length(dataset, repeats):
    advice = ask(loader=DataLoader(dataset(), batch_sampler=[[0, 1], [2, 3], [4, 5]]))
    assert advice.repeats is repeats and advice.num_samples == (40 if repeats else None)


def test_a_data_set_may_put_batches_together_itself():
    advice = ask(loader=DataLoader(Whole(as_batches=True), batch_size=None, sampler=[[0, 1], [2, 3]]))
    assert advice.repeats is None and len(advice.costs) == NUM_BLOCKS + 1


# Bad input


class OfItsOwn(DataLoader):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"loader": iter([1, 2])}, "a list of a few batches"),
        ({"loader": []}, "found none"),
        ({"rounds": 0}, "rounds must be"),
        ({"evaluate": lambda _: None}, "belong together"),
        ({"loss": lambda model, batch: None}, "An iteration on the copy"),
        ({"loss": None}, "Pass loss="),
        ({"config": {"modules": {"target_share": 3}}}, "target_share"),
        ({"evaluate": lambda _: None, "iterations_per_evaluation": 0}, "iterations_per_evaluation must be"),
        ({"evaluate": lambda _: 1 / 0, "iterations_per_evaluation": 3}, "leave it out"),
        ({"loader": {1, 2}}, "a list of a few batches"),
        ({"loader": OfItsOwn(samples(), batch_size=4)}, "a list of a few batches"),
    ],
)
def test_bad_input_is_refused_with_the_next_step(wrong, said):
    with pytest.raises(ConfigError, match=said):
        ask(**{"loader": DataLoader(samples(), batch_size=4), **wrong})


def test_a_model_that_several_processes_train_is_refused():
    class Wrapper(nn.parallel.DataParallel):
        pass

    with pytest.raises(ConfigError, match="without a wrapper"):
        ask(Wrapper(blocks()))


def test_a_compiled_model_is_refused():
    in_place, in_part = blocks(), blocks()
    in_place.compile(backend="eager")
    in_part[1] = torch.compile(in_part[1], backend="eager")
    for model in (in_place, in_part, torch.compile(blocks(), backend="eager")):
        with pytest.raises(ConfigError, match="must not be compiled"):
            ask(model)


def test_a_model_without_memory_of_its_own_is_refused():
    with torch.device("meta"):
        model = blocks()
    with pytest.raises(ConfigError, match="meta"):
        ask(model)


def test_optimizers_that_cannot_be_watched_are_refused():
    model, loader = blocks(), DataLoader(samples(), batch_size=4)
    for wrong, said in ((None, "torch.optim.Optimizer"), (torch.optim.LBFGS(model.parameters()), "LBFGS")):
        with pytest.raises(ConfigError, match=said):
            advise(model, wrong, loader, loss=loss)


def test_a_call_without_gradients_is_refused():
    with torch.no_grad(), pytest.raises(ConfigError, match="switched off"):
        ask()


def test_a_job_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr("egeria.dist.world_size", lambda: 2)
    with pytest.raises(ConfigError, match="a job of 2 processes"):
        ask()


def test_a_plan_that_is_none_or_has_steps_is_refused():
    advice = ask(rounds=1)
    for plan in ("half:2", "step 100:2"):
        with pytest.raises(ConfigError, match=f"plan must .*{plan}"):
            advice.saving(plan)
