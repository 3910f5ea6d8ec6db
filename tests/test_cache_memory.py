"""The default cache: activations in memory, found by the input itself, without a loader and without a trace."""

from __future__ import annotations

import gc
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import egeria
from cached import Pictures, assert_no_stubs, freezes_up_to, nothing_but_journals, small_resnet
from egeria.cache import Outlook, forward_modes, memory, memory_forward
from egeria.cache.memory_forward import LEAST_POSITIONS, MemoryForward
from egeria.cache.store import memory as store_memory
from egeria.cache.store.memory import RowMemory, free_memory_bytes, row_keys
from egeria.errors import without_frames
from egeria.events import CacheDecided, CacheUsed, Declined, FaultCaught
from egeria.model.batch import Batch
from egeria.session import skipping
from egeria.skipping.prefix import Prefix
from egeria.testing import ScriptedController
from loops import FAST, differences

EPOCH = 10
EPOCHS = 8


class Loop:
    """A loop without a DataLoader: batches of pictures, in another order in each epoch."""

    def __init__(
        self,
        directory,
        *,
        transform=torch.Tensor.clone,
        settings=None,
        depth=1,
        loader=None,
        freezing=None,
        script=None,
        build=small_resnet,
        call=lambda model, images, epoch: model(images),
    ):
        torch.manual_seed(0)
        self.model, self.directory, self.transform, self.call = build(), directory, transform, call
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.data, self.order = Pictures(), torch.Generator().manual_seed(1)
        self.losses, self.was_hooked = [], []
        self.run = egeria.attach(
            self.model,
            self.optimizer,
            loader or range(EPOCH),  # all that is asked of a loader is its length
            total_steps=EPOCH * EPOCHS,
            directory=directory,
            controller=ScriptedController(script or freezes_up_to(depth)),
            config={**FAST, "cache": {"gate": "open", **(settings or {})}, "freezing": freezing or {}},
        )

    def epoch(self):
        for rows in torch.randperm(80, generator=self.order).split(8):
            self.was_hooked.append((self.run.frozen, "forward" in vars(self.model)))
            self.model.train()
            images = self.transform(self.data.images[rows])
            output = self.call(self.model, images, len(self.losses) // EPOCH)
            loss = nn.functional.cross_entropy(output, self.data.labels[rows])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.run.step(loss)
            self.losses.append(loss.item())

    def serve(self, depth=1):
        """Train until something was served behind so many layer modules, to the end of the epoch."""
        while self.run.frozen < depth or not isinstance(self.mode, MemoryForward) or self.mode.use.hits == 0:
            self.epoch()
        return self

    @property
    def reasons(self):
        """Why it was not, or no longer, stored."""
        decided = [event for event in self.journal(CacheDecided) if event.mode == "computed"]
        return [event.reason for event in decided if event.reason != "nothing is frozen any more"]

    def finish(self):
        while len(self.losses) < EPOCH * EPOCHS:
            self.epoch()
        self.run.close()
        assert_no_stubs(self.model)
        return self

    @property
    def mode(self):
        skipping = self.run._session._skipping
        return None if skipping is None else skipping._cache.mode

    def journal(self, kind):
        return egeria.read_journal(self.directory).of(kind)

    def everything(self):
        return {**self.model.state_dict(), "losses": torch.tensor(self.losses), "random": torch.get_rng_state()}


@pytest.fixture
def plain(tmp_path):
    return Loop(tmp_path / "plain", settings={"enabled": False}).finish()


def test_by_default_repeated_inputs_are_served_from_memory_and_training_is_the_same(tmp_path, plain):
    with nothing_but_journals(tmp_path):
        cached = Loop(tmp_path / "cached").finish()
    used = cached.journal(CacheUsed)[-1]
    assert used.hits > 400 and used.misses <= 160 and used.checks > 0 and used.largest_error == 0
    assert used.size_bytes > 80 * 2**12 and used.bytes_written == 0
    assert differences(plain.everything(), cached.everything()) == []


def test_before_a_freeze_and_where_nothing_is_stored_the_model_is_untouched(tmp_path):
    loop = Loop(tmp_path).finish()
    assert {hooked for frozen, hooked in loop.was_hooked if not frozen} == {False}
    assert {hooked for frozen, hooked in loop.was_hooked[-EPOCH:] if frozen} == {True}
    judged = Loop(tmp_path / "judged", settings={"gate": "auto", "memory_share": 1e-12}).finish()
    assert {hooked for _, hooked in judged.was_hooked[-EPOCH:]} == {False}
    assert judged.journal(CacheDecided)[-1].mode == "computed" and judged.journal(Declined) == []


def augmented(images):
    return images + torch.rand(len(images), 1, 1, 1)


def test_random_inputs_end_it_with_a_reason_and_without_a_warning(tmp_path):
    plain = Loop(tmp_path / "plain", transform=augmented, settings={"enabled": False}).finish()
    loop = Loop(tmp_path / "random", transform=augmented)
    freed = None
    while len(loop.losses) < EPOCH * EPOCHS:
        loop.epoch()
        if freed is None and isinstance(loop.mode, MemoryForward):
            freed = weakref.ref(loop.mode.memory)
    assert loop.run.frozen and "forward" not in vars(loop.model) and not loop.model._forward_pre_hooks
    loop.run.close()
    gc.collect()
    assert freed is not None and freed() is None
    assert [event.mode for event in loop.journal(CacheDecided)] == ["stored", "computed"]
    assert "inputs do not come again: of the last" in loop.journal(CacheDecided)[-1].reason
    assert loop.journal(CacheUsed)[-1].batches <= 64
    assert differences(plain.everything(), loop.everything()) == []


ROW_BYTES = 16 * 8 * 8 * 4
"""Of what crosses behind the first layer module."""


@pytest.mark.parametrize(("local", "parts"), [("2", 2), ("many", 1), ("0", 1)])
def test_a_full_memory_goes_on_serving_what_is_in_it_and_checks_it(tmp_path, plain, monkeypatch, local, parts):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    limit = 40 * ROW_BYTES + 2**14
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 4 * parts * limit)
    loop = Loop(tmp_path / "full", settings={"verify_batches": 5}).finish()
    used = loop.journal(CacheUsed)[-1]
    assert limit // 2 < used.size_bytes <= limit
    assert 0.3 < used.hits / (used.hits + used.misses) < 0.7
    assert used.checks >= 8 and used.largest_error == 0
    assert differences(plain.everything(), loop.everything()) == []


def test_what_a_memory_that_holds_a_part_serves_is_checked_too(tmp_path, monkeypatch):
    """A large weight that was written through `data` shows in nothing but what the frozen layers give."""
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 4 * (40 * ROW_BYTES + 2**14))
    loop = Loop(tmp_path, depth=2, settings={"verify_batches": 3}).serve(2)
    checks = loop.mode.use.checks
    loop.model.layer2[0].conv2.weight.data.mul_(1.5)
    before = len(loop.losses)
    while isinstance(loop.mode, MemoryForward):
        loop.epoch()
    loop.finish()
    decided = loop.journal(CacheDecided)[-1]
    assert "stored activations differ from computed ones" in decided.reason
    assert decided.step <= before + 5 and checks > 0


def test_less_is_stored_where_memory_gets_short_meanwhile(tmp_path, plain, monkeypatch):
    monkeypatch.setattr(store_memory, "LOOK_BYTES", 16 * ROW_BYTES)
    free = iter([400 * ROW_BYTES, 400 * ROW_BYTES])
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: next(free, 0))
    loop = Loop(tmp_path / "short").finish()
    used = loop.journal(CacheUsed)[-1]
    assert 30 * ROW_BYTES < used.size_bytes < 50 * ROW_BYTES
    assert used.hits > 100 and differences(plain.everything(), loop.everything()) == []


GROUPS = {
    "version 2": ("0::{}", "", "memory.max", "memory.current", "inactive_file"),
    "version 1": (
        "7:cpu,cpuacct:/elsewhere\n4:memory:{}\n0::/elsewhere",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


@pytest.mark.parametrize("version", GROUPS)
@pytest.mark.parametrize("path", ["/", "/job/step", "/of/the/host"])
def test_free_memory_is_what_the_limits_around_the_process_leave(version, path, tmp_path):
    membership, mount, *names = GROUPS[version]

    def limit(group, most, used, inactive):
        folder = tmp_path / "sys/fs/cgroup" / mount / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(f"{most}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 7\nx{names[2]} 9\n{names[2]} {inactive}\nfile 3\n")

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable:  800 kB\n")
    assert free_memory_bytes(tmp_path) == 800 * 1024, "without control groups"
    (tmp_path / "proc/self/cgroup").write_text(membership.format(path) + "\n")
    assert free_memory_bytes(tmp_path) == 800 * 1024, "without limits"
    limit("", 700_000, 100_000, 50_000)
    assert free_memory_bytes(tmp_path) == 650_000, "of the root"
    limit("job", 500_000, 300_000, 1000)
    limit("job/step", "max" if version == "version 2" else 2**63 - 4096, 200_000, 0)
    assert free_memory_bytes(tmp_path) == (201_000 if path == "/job/step" else 650_000)
    limit("job/step", 150_000, 200_000, 0)
    assert free_memory_bytes(tmp_path) == (0 if path == "/job/step" else 650_000)


def test_a_deeper_freeze_and_a_thaw_free_what_was_stored(tmp_path):
    loop = Loop(tmp_path, depth=2)
    memories = set()
    while len(loop.losses) < EPOCH * EPOCHS:
        loop.epoch()
        if isinstance(loop.mode, MemoryForward):
            memories.add(weakref.ref(loop.mode.memory))
    loop.run.close()
    gc.collect()
    assert {reference() for reference in memories} == {None}
    assert len({event.generation for event in loop.journal(CacheUsed)}) == 2


class Chain(nn.Module):
    """Four blocks; what tests set decides what else the model does."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(192))
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(192, 10)
        self.reaches = self.is_empty = False
        self.gain = 1.0

    def forward(self, images):
        first = self.blocks[0](self.gain * images.flatten(1) + self.position)
        second = self.blocks[1](first)
        x = self.blocks[2](second)
        if self.reaches:
            x = x + first
        return self.head(self.blocks[3](x)), (second[:0] if self.is_empty else second).mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale, self.scaling = nn.Linear(192, 192), 1.0, {"default": 1.0}

    def forward(self, x):
        return x + self.scale * self.scaling["default"] * torch.tanh(self.inner(x))


def first_output(model, images, epoch):
    return model(images)[0]


def changed_while_served(tmp_path, change):
    """Train a chain with the cache and without, both changed after the same step; return both."""
    cached = Loop(tmp_path / "cached", build=Chain, depth=2, call=first_output).serve(2)
    plain = Loop(tmp_path / "plain", build=Chain, depth=2, call=first_output, settings={"enabled": False})
    while len(plain.losses) < len(cached.losses):
        plain.epoch()
    for loop in (plain, cached):
        change(loop.model)
        loop.finish()
    assert differences(plain.everything(), cached.everything()) == []
    return cached


def scale(model):
    model.blocks[0].scale = 0.5


def scale_the_adapter(model):
    model.blocks[1].scaling["default"] = 0.5


def add_an_adapter(model):
    model.blocks[1].scaling = {"default": 0.5, "other": 1.0}


@torch.no_grad()
def multiply(model):
    model.blocks[0].inner.weight.mul_(0.5)


@torch.no_grad()
def move_the_position(model):
    model.position.mul_(0.5)


def reach(model):
    model.reaches = True


def amplify(model):
    model.gain = 1.5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (multiply, "the weights of the frozen layers were changed"),
        (move_the_position, "the weights of the frozen layers were changed"),
        (scale, "an attribute of a frozen layer was set to another value"),
        (scale_the_adapter, "an attribute of a frozen layer was set to another value"),
        (add_an_adapter, "an attribute of a frozen layer was set to another value"),
        (amplify, "stored activations differ from computed ones"),
        (reach, "with the frozen layers skipped the output of the model has NaN in it"),
    ],
)
def test_what_changes_under_it_ends_it_and_training_is_the_same(tmp_path, change, reason):
    loop = changed_while_served(tmp_path, change)
    assert len(loop.reasons) == 1 and reason in loop.reasons[0]
    assert {event.what for event in loop.journal(Declined)} == ({"freezing"} if "weights" in reason else set())
    assert loop.journal(FaultCaught) == []


@pytest.mark.parametrize("every", [1, 2])
def test_a_counter_that_the_loop_keeps_in_the_model_ends_nothing(tmp_path, every):
    calls = []

    def call(model, images, _):
        calls.append(model)
        model.counter = len(calls) // every
        return model(images)[0]

    loop = Loop(tmp_path, build=Chain, depth=2, call=call).finish()
    used = loop.journal(CacheUsed)[-1]
    assert loop.reasons == [] and used.hits > 300 and memory_forward.HARMLESS <= used.checks < 20


class Standardised(Chain):
    """Has a statistic in training that is changed in place, and used in the same pass; is called in several ways."""

    def __init__(self):
        super().__init__()
        self.register_buffer("spread", torch.ones(()))

    def forward(self, images, kind=0):
        x = self.blocks[2](self.blocks[1](self.blocks[0](images.flatten(1))))
        self.spread.mul_(0.9).add_(0.1 * x.detach().std())
        return self.head(self.blocks[3](x / self.spread)), kind


def test_another_kind_of_batch_is_tried_out_before_a_graph_of_the_loop_waits(tmp_path):
    def call(model, images, epoch):
        return model(images, epoch % 3)[0]

    plain = Loop(tmp_path / "plain", build=Standardised, depth=2, call=call, settings={"enabled": False}).finish()
    cached = Loop(tmp_path / "cached", build=Standardised, depth=2, call=call).finish()
    assert cached.reasons == [] and cached.journal(CacheUsed)[-1].hits > 150
    assert differences(plain.everything(), cached.everything()) == []


def test_what_cannot_be_kept_of_a_pass_of_the_loop_does_not_stop_it(tmp_path, plain, monkeypatch):
    def failing(self, name, output):
        raise MemoryError("no room for a copy")

    loop = Loop(tmp_path / "short")
    while not isinstance(loop.mode, MemoryForward):
        loop.epoch()
    monkeypatch.setattr("egeria.skipping.replay.Template.add", failing)
    loop.mode.memory.close()  # so that passes are recorded again
    loop.finish()
    assert len(loop.reasons) == 1 and "could not be kept (no room for a copy)" in loop.reasons[0]
    assert differences(plain.everything(), loop.everything()) == []


def test_a_failure_holds_on_to_no_graph():
    try:
        try:
            raise ValueError("inner")
        except ValueError as inner:
            raise RuntimeError("outer") from inner
    except RuntimeError as outer:
        error = without_frames(outer)
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)


def test_a_pass_made_again_begins_as_the_first_did():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_calls = 0
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x):
            self.num_calls += 1
            self.mean = 0.5 * self.mean + x.mean()
            return x - self.mean

    model, x = Counting(), torch.ones(3)
    rollback = forward_modes.Rollback(model)
    first = model(x)
    rollback.save()
    second = model(x)
    rollback.restore()
    rollback.forget()
    rollback.restore()
    assert torch.equal(model(x), second) and not torch.equal(first, second) and model.num_calls == 2


@pytest.mark.parametrize("cache", [{}, {"enabled": True}], ids=["memory", "disk"])
def test_what_layers_keep_of_a_pass_is_not_held_behind_it(tmp_path, cache):
    """Such as maps of attention: held until the next pass, they would add to what the backward pass needs."""

    class Keeping(Chain):
        def forward(self, images):
            output = super().forward(images)
            self.kept = output[0].detach().clone()
            return output

    loader = torch.utils.data.DataLoader(Pictures(), batch_size=8)
    loop = Loop(tmp_path, build=Keeping, depth=2, call=first_output, settings=cache, loader=loader)
    held = []
    for _ in range(EPOCHS):
        for images, labels in loader:
            loop.model.train()
            kept = weakref.ref(loop.model.kept) if hasattr(loop.model, "kept") else lambda: None
            loss = nn.functional.cross_entropy(loop.model(images)[0], labels)
            held.append(kept() is not None)
            loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.run.step(loss)
    loop.run.close()
    assert loop.journal(CacheUsed)[-1].hits > 100 and not any(held)


def test_the_epochs_ahead_are_counted_in_micro_batches_also_where_a_run_is_resumed(tmp_path):
    def train(name, steps, state=None):
        model = small_resnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        run = egeria.attach(
            model, optimizer, range(100), total_steps=40, plan="0.25:1 0.5:2", directory=tmp_path / name
        )
        if state is not None:
            run.load_state_dict(state)
        for _ in range(steps):
            for _ in range(4):
                model(torch.randn(2, 3, 8, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(0.0)
        state = run.state_dict()
        run.close()
        return state, [event.reason for event in egeria.read_journal(tmp_path / name).of(CacheDecided)]

    state, first = train("first", 15)
    _, second = train("second", 10, state)
    expected = ["within 0.4 epochs", "within 0.2 epochs", "within 0.8 epochs"]
    assert len(first + second) == 3 and all(map(str.__contains__, first + second, expected)), first + second


def test_what_is_set_to_what_it_was_ends_nothing(tmp_path):
    def set_again(model):
        model.blocks[0].scale, model.blocks[1].scaling = float("1"), {"default": 1.0}

    assert changed_while_served(tmp_path, set_again).reasons == []


def test_a_nan_of_the_users_own_ends_nothing(tmp_path):
    """Such as a loss over no labels, beside an output that is fine."""

    def empty(model):
        model.is_empty = True

    loop = changed_while_served(tmp_path, empty)
    assert loop.reasons == [] and loop.journal(CacheUsed)[-1].hits > 300


def test_an_argument_that_all_samples_share_may_change(tmp_path):
    """Each epoch has one of two contexts, from which a frozen layer computes what is the same for all samples."""
    contexts = [torch.full((1, 192), 1.0), torch.full((1, 192), -1.0)]

    def call(model, images, epoch):
        return model(images, contexts[epoch % 2])

    def build():
        return Conditioned()

    plain = Loop(tmp_path / "plain", build=build, depth=2, call=call, settings={"enabled": False}).finish()
    cached = Loop(tmp_path / "cached", build=build, depth=2, call=call).finish()
    assert cached.journal(CacheUsed)[-1].hits >= 160, cached.journal(CacheDecided)
    assert differences(plain.everything(), cached.everything()) == []


class Conditioned(Chain):
    """Adds to what comes behind the frozen blocks what the second of them makes of a context."""

    def forward(self, images, context):
        x = self.blocks[0](images.flatten(1))
        return self.head(self.blocks[3](self.blocks[2](x + self.blocks[1](context))))


def test_a_fault_of_ours_leaves_training_as_it_is(tmp_path, plain, monkeypatch):
    def failing(*_):
        raise RuntimeError("injected")

    monkeypatch.setattr(MemoryForward, "_rows", failing)
    with pytest.warns(egeria.EgeriaWarning, match="injected"):
        loop = Loop(tmp_path / "faulty").finish()
    assert [event.mode for event in loop.journal(CacheDecided)] == ["stored", "computed"]
    assert differences(plain.everything(), loop.everything()) == []


def test_what_the_epochs_ahead_would_not_repay_is_not_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(skipping, "Outlook", lambda **_: Outlook(steps_ahead=5.0))
    loop = Loop(tmp_path, settings={"gate": "auto"}).finish()
    (decided,) = loop.journal(CacheDecided)
    assert decided.mode == "computed" and "within 0.5 epochs" in decided.reason


# --- sentences -----------------------------------------------------------------------------------


class Sentences:
    """Batches of sentences, padded to the longest of each batch, with a label each or one for each word."""

    def __init__(self, *, has_tags=False):
        self.has_tags = has_tags
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 24, (96,), generator=generator).tolist()
        self.words = [torch.randint(1, 50, (length,), generator=generator) for length in lengths]
        self.order = torch.Generator().manual_seed(1)

    def epoch(self):
        for rows in torch.randperm(96, generator=self.order).split(16):
            words = nn.utils.rnn.pad_sequence([self.words[row] for row in rows], batch_first=True)
            lengths = torch.tensor([len(self.words[row]) for row in rows])
            mask = (torch.arange(words.shape[1]) < lengths[:, None]).long()
            labels = torch.where(mask > 0, words % 2, -100) if self.has_tags else lengths % 2
            yield {"input_ids": words, "attention_mask": mask, "labels": labels}


def train_sentences(directory, enabled, *, has_tags=False):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    kind = transformers.BertForTokenClassification if has_tags else transformers.BertForSequenceClassification
    model = kind(transformers.BertConfig(vocab_size=50, **shape))
    optimizer, data, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), Sentences(has_tags=has_tags), []
    with egeria.attach(
        model,
        optimizer,
        total_steps=120,
        directory=directory,
        controller=ScriptedController(freezes_up_to(1)),
        config={**FAST, "cache": {"enabled": enabled, "gate": "open", "verify_batches": 3}},
    ) as run:
        for _ in range(20):
            model.train()
            for batch in data.epoch():
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
                losses.append(loss.item())
    return torch.tensor(losses), egeria.read_journal(directory)


def test_a_sentence_is_served_where_its_batch_is_padded_to_the_same_length_and_training_is_the_same(
    tmp_path, monkeypatch
):
    tried = []
    learn = Prefix.learn
    monkeypatch.setattr(Prefix, "learn", lambda self, batch: tried.append(batch) or learn(self, batch))
    expected, _ = train_sentences(tmp_path / "plain", enabled=False)
    losses, journal = train_sentences(tmp_path / "cached", enabled="auto")
    used = journal.of(CacheUsed)[-1]
    assert used.hits > used.misses and used.checks > 5 and used.largest_error == 0
    assert torch.equal(losses, expected)
    assert len(tried) == 2, "two lengths more are tried out, and all others taken to be like them"


def test_of_sentences_whose_padding_cannot_be_cut_only_those_that_are_missing_are_computed(tmp_path, monkeypatch):
    """A model that gives something for each word gives something else for the padding, were that not stored."""
    counts, compute = [], Prefix.compute

    def counted(self, batch, rows=None):
        counts.append(16 if rows is None else len(rows))
        return compute(self, batch, rows)

    monkeypatch.setattr(Prefix, "compute", counted)
    expected, _ = train_sentences(tmp_path / "plain", enabled=False, has_tags=True)
    losses, journal = train_sentences(tmp_path / "cached", enabled="auto", has_tags=True)
    used = journal.of(CacheUsed)[-1]
    assert used.hits > used.misses and used.checks > 5 and used.largest_error == 0
    assert torch.equal(losses, expected)
    assert any(count < 12 for count in counts) and all(23 * count >= LEAST_POSITIONS for count in counts)


def keys(num_rows=2, shared=(), **kwargs):
    return row_keys(Batch.of_call((), kwargs, "cpu"), num_rows, shared)


def padded(length):
    words = torch.zeros(2, length, dtype=torch.long)
    words[:, :3] = torch.tensor([[1, 2, 3], [4, 5, 0]])
    return {"input_ids": words, "attention_mask": (words != 0).long()}


def test_a_key_is_of_the_input_and_its_shape_and_of_how_the_model_is_called():
    known = keys(**padded(7))
    assert keys(**padded(7), num_items_in_batch=torch.tensor(9)) == known
    otherwise = padded(7)
    otherwise["input_ids"][1, 6] = 9
    assert [a == b for a, b in zip(keys(**otherwise), known, strict=True)] == [True, False], "padding counts too"
    others = [
        padded(3),
        {**padded(7), "use_cache": False},
        {**padded(7), "scale": torch.tensor(2.0)},
        {**padded(7), "part": slice(0, 2)},
        {**padded(7), "part": slice(0, 3)},
        {**padded(7), "input_ids": padded(7)["input_ids"].int()},
        {"input_ids": padded(7)["attention_mask"], "attention_mask": padded(7)["input_ids"]},
    ]
    found = [keys(**other) for other in others]
    assert len({key for rows in [known, *found] for key in rows}) == 2 * (1 + len(others))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not {*keys(**padded(7))} & {*known}


def test_a_tensor_as_long_as_the_padding_counts_whole():
    """Five words in a batch padded to seven, with seven features a sample: the last two are no padding."""
    features = torch.arange(14.0).view(2, 7)
    other = features.clone()
    other[:, 5:] += 1
    assert not {*keys(**padded(7), features=features)} & {*keys(**padded(7), features=other)}


def test_a_tensor_that_samples_share_counts_for_all_also_where_it_is_as_long_as_the_batch():
    first, other = torch.ones(2, 2), torch.ones(2, 2)
    other[1] = 0
    one, two = (keys(shared=[".1.mask"], x=torch.ones(2, 3), mask=mask) for mask in (first, other))
    assert not {*one} & {*two}


def test_without_a_look_into_everything_that_is_given_there_are_no_keys():
    for thing in [np.ones(3), {1, 2}, object(), torch.Generator(), torch.ones(2, 3).to_sparse()]:
        assert keys(x=torch.ones(2, 3)) is not None
        assert keys(x=torch.ones(2, 3), thing=thing) is None
        assert keys(x=torch.ones(2, 3), things=[{"a": thing}]) is None


@pytest.mark.parametrize("default", ["cpu", "meta"])
@pytest.mark.parametrize("lengths", [None, (3, 1)])
def test_rows_come_back_as_they_were_whatever_the_default_device_is(lengths, default):
    store = RowMemory([None if lengths is None else 1, None], lambda _: 2**20)
    rows = [torch.randn(2, 4, 3), torch.tensor([True, False])]
    lengths = None if lengths is None else torch.tensor(lengths).numpy()
    with torch.device(default):
        store.write([b"a", b"b"], rows, lengths)
        found = store.read([b"b", b"?", b"a"], store.knows([b"b", b"?", b"a"]), 3 if lengths is None else 5)
    if lengths is None:
        assert torch.equal(found[0][[2, 0]], rows[0])
    else:
        assert found[0].shape == (3, 4, 5)
        assert torch.equal(found[0][2, :, :3], rows[0][0]) and torch.equal(found[0][0, :, :1], rows[0][1, :, :1])
        assert not found[0][0, :, 1:].any()
    assert found[1][[2, 0]].tolist() == [True, False]


def test_memory_is_counted_and_given_back():
    store = RowMemory([None], lambda _: 2**26)
    for key in range(100):
        store.write([str(key).encode()], [torch.zeros(1, 2**18)], None)
    assert store.is_full and 2**25 < store.size_bytes <= 2**26
    assert 2**25 < sum(leaf.untyped_storage().nbytes() for block in store._blocks for leaf in block) <= 2**26
    store.close()
    assert store.size_bytes == 0 and len(store) == 0
    assert free_memory_bytes() > 2**20


# --- whether it pays ----------------------------------------------------------------------------


class SlowConv(nn.Conv2d):
    """Takes 5 ms more than it has to."""

    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)


def slow_resnet():
    model = small_resnet()
    model.conv1 = SlowConv(3, 16, 3, padding=1, bias=False)
    return model


@pytest.fixture(autouse=True)
def quick_trials(monkeypatch):
    """Let what is saved in a short test be worth finding out how."""
    monkeypatch.setattr(memory, "TRIAL_ITERATIONS", 1)


class PatientLoop(Loop):
    """A loop in which the cache is asked whether it pays, and the boundary known to stay for 200 steps."""

    def __init__(self, directory, **settings):
        super().__init__(directory, build=slow_resnet, settings={"gate": "auto"}, **settings)
        self.run._session._skipping._outlook = lambda *_: Outlook(steps_ahead=200.0)


def test_what_saves_time_is_stored_and_served(tmp_path):
    loop = PatientLoop(tmp_path).finish()
    stored = next(event for event in loop.journal(CacheDecided) if event.mode == "stored")
    assert stored.numbers["prefix_s"] >= 0.005
    assert loop.journal(CacheUsed)[-1].hits > 50
    assert loop.reasons == []


def test_serving_that_is_slower_than_computing_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(forward_modes, "REVIEWED_BATCHES", 8)
    read = RowMemory.read

    def read_slowly(memory, keys, known, padded_length):
        if len(memory) > len(keys):  # not where it is timed
            time.sleep(0.1)
        return read(memory, keys, known, padded_length)

    monkeypatch.setattr(RowMemory, "read", read_slowly)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop = PatientLoop(tmp_path).finish()
    assert [event.mode for event in loop.journal(CacheDecided)] == ["stored", "computed"]
    assert "an iteration with stored activations takes" in loop.reasons[-1]


class Queue:
    """Stands for that of an accelerator: each event comes a second after the one before it, and is waited for once."""

    device, moments, waits = torch.device("cpu"), 0, 0

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, _):
            Queue.moments += 1
            self.at = Queue.moments

        def synchronize(self):
            Queue.waits += 1

        def elapsed_time(self, later):
            return 1e3 * (later.at - self.at)


def test_on_an_accelerator_the_front_is_timed_in_its_queue_and_nothing_waits_before_it_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Queue.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(forward_modes, "_one_accelerator", lambda _: Queue.device)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    timed, inputs = forward_modes.TimedForward([model[0], model[1]], enough=3), torch.ones(2, 4)
    for _ in range(3):
        assert not timed.has_seen_enough()
        timed.forward(forward_modes.UserForward(lambda: model(inputs)), batch_of(inputs), None)
    assert timed.has_seen_enough() and Queue.waits == 0
    assert (timed.iteration_s, timed.prefix_s) == (5.0, 3.0), "one event before a pass, and two for each of two layers"
    assert Queue.waits > 0 and not any(module._forward_hooks for module in model)


def batch_of(*args, **kwargs):
    return Batch.of_call(args, kwargs, "cpu")
