"""`egeria.advise`: it changes nothing, and what it foretells is what a run saves."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import egeria
from egeria import advise
from egeria.errors import ConfigError
from loops import Loop, differences, outside
from menagerie import MENAGERIE

SUPPORTED = [specimen for specimen in MENAGERIE if not specimen.unsupported]
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


# It changes nothing


@pytest.mark.parametrize("specimen", SUPPORTED, ids=lambda specimen: specimen.name)
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
    assert advice.saving("0.5:2", cached=True) == pytest.approx((BACKWARD_S + BLOCK_S + FORWARD_S / 2) / PLAIN_S)
    assert [cost.depth for cost in advice.costs] == list(range(NUM_BLOCKS + 1))
    assert advice.is_worth_it and "Worth a try" in repr(advice)


def test_evaluations_make_the_share_that_is_saved_smaller():
    def evaluate(_model):
        CLOCK.now_s += 10 * PLAIN_S  # as long as the iterations to the next

    advice = ask(evaluate=evaluate, iterations_per_evaluation=10)
    assert advice.saving("0:4") == pytest.approx(ask().saving("0:4") / 2)


def test_memory_is_that_of_gradients_optimizer_state_and_what_is_kept_for_the_backward_pass():
    advice = ask()
    first, last = advice.costs[0], advice.costs[-1]
    per_block, head = (8 * 8 + 8) * 4, (8 * 2 + 2) * 4
    assert first.gradient_bytes == NUM_BLOCKS * per_block + head and last.gradient_bytes == head
    assert first.optimizer_bytes == first.gradient_bytes and last.optimizer_bytes == last.gradient_bytes  # momentum
    assert first.activation_bytes > last.activation_bytes > 0
    batches = [(torch.randn(size, 8), torch.arange(size) % 2) for size in (4, 40, 8)]  # counted on the same, each
    kept = [cost.activation_bytes for cost in ask(loader=batches).costs]
    assert kept == sorted(kept, reverse=True)


def test_a_tied_weight_that_trains_on_keeps_its_gradient_and_state():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.blocks = nn.Embedding(40, 8), nn.Sequential(Block(), Block())
            self.head = nn.Linear(8, 40, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x):
            return self.head(self.blocks(self.words(x)))

    words = torch.arange(8)
    advice = ask(Tied(), [(words, words)] * 2)
    assert all(cost.gradient_bytes >= 40 * 8 * 4 for cost in advice.costs)


def test_batches_that_the_model_overwrites_stay_as_they_were():
    batches = [(torch.ones(4, 8), torch.zeros(4, dtype=torch.long))]
    ask(loader=batches, loss=lambda model, batch: loss(model, (batch[0].mul_(2), batch[1])))
    assert torch.equal(batches[0][0], torch.ones(4, 8))


def test_settings_that_keep_a_run_from_freezing_at_once_do_not_count():
    advice = ask(config={"freezing": {"enabled": False, "landing": "average"}})
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


def test_a_schedule_that_is_none_is_refused():
    advice = ask(rounds=1)
    with pytest.raises(ConfigError):
        advice.saving("half:2")
