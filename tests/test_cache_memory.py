"""The default cache: activations in memory, found by the input itself, without a loader and without a trace."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import egeria
from cached import Pictures, assert_no_stubs, freezes_up_to, nothing_but_journals, small_resnet
from egeria.cache import memory, memory_forward
from egeria.cache.memory_forward import MemoryForward
from egeria.cache.store.memory import RowMemory, free_memory_bytes, row_keys
from egeria.events import CacheDecided, CacheUsed, Declined, FaultCaught
from egeria.layers.batch import Batch
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
    ):
        torch.manual_seed(0)
        self.model, self.directory, self.transform = small_resnet(), directory, transform
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
            loss = nn.functional.cross_entropy(self.model(images), self.data.labels[rows])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.run.step(loss)
            self.losses.append(loss.item())

    def finish(self):
        while len(self.losses) < EPOCH * EPOCHS:
            self.epoch()
        self.run.close()
        assert_no_stubs(self.model)
        return self

    @property
    def mode(self):
        return self.run._session.skipping._cache.mode

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
    loop.run.close()
    gc.collect()
    assert freed is not None and freed() is None
    assert [event.mode for event in loop.journal(CacheDecided)] == ["stored", "computed"]
    assert "inputs do not come again: of the last" in loop.journal(CacheDecided)[-1].reason
    assert loop.journal(CacheUsed)[-1].batches <= 64
    assert differences(plain.everything(), loop.everything()) == []


@pytest.mark.parametrize(("deeper_at", "is_tried"), [(25, False), (31, True)])
def test_random_inputs_are_tried_again_after_twice_as_many_steps(tmp_path, monkeypatch, deeper_at, is_tried):
    """An augmentation may be switched off for the last epochs; at step 58 it is early for that, at 70 it is not."""
    monkeypatch.setattr(memory_forward, "WINDOW_BATCHES", 4)

    def script(evaluation, module):
        return 1.0 if module == 0 or (module == 1 and evaluation > deeper_at) else 2.0**evaluation

    plain = Loop(tmp_path / "plain", transform=augmented, settings={"enabled": False}, script=script).finish()
    loop = Loop(tmp_path / "random", transform=augmented, script=script).finish()
    first, ended, deeper = loop.journal(CacheDecided)[:3]
    assert (first.mode, ended.mode, ended.step) == ("stored", "computed", 30)
    assert deeper.generation == 2 and (deeper.step >= 60) == is_tried
    if is_tried:
        assert deeper.mode == "stored"
    else:
        assert deeper.mode == "computed" and "at step 30; that is tried again from step 60 on" in deeper.reason
    assert differences(plain.everything(), loop.everything()) == []


def test_a_full_memory_goes_on_serving_what_is_in_it(tmp_path, plain, monkeypatch):
    row_bytes = 16 * 8 * 8 * 4
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 4 * (40 * row_bytes + 2**14))
    loop = Loop(tmp_path / "full").finish()
    used = loop.journal(CacheUsed)[-1]
    assert used.size_bytes <= 40 * row_bytes + 2**14
    assert 0.3 < used.hits / (used.hits + used.misses) < 0.7
    assert differences(plain.everything(), loop.everything()) == []


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


def test_weights_that_change_under_it_end_it(tmp_path):
    loop = Loop(tmp_path)
    while not isinstance(loop.mode, MemoryForward) or loop.mode.use.hits == 0:
        loop.epoch()
    with torch.no_grad():
        next(loop.model.parameters()).mul_(0.5)
    loop.finish()
    assert "the weights of the frozen layers were changed" in loop.journal(CacheDecided)[-1].reason
    assert loop.journal(Declined) == [] and loop.journal(FaultCaught) == []


def test_a_fault_of_ours_leaves_training_as_it_is(tmp_path, plain, monkeypatch):
    def failing(*_):
        raise RuntimeError("injected")

    monkeypatch.setattr(MemoryForward, "_rows", failing)
    with pytest.warns(egeria.EgeriaWarning, match="injected"):
        loop = Loop(tmp_path / "faulty").finish()
    assert [event.mode for event in loop.journal(CacheDecided)] == ["stored", "computed"]
    assert differences(plain.everything(), loop.everything()) == []


def test_what_takes_no_time_is_not_stored(tmp_path):
    loop = Loop(tmp_path, settings={"gate": "auto"})
    loop.run._session.skipping._make_outlook = lambda **_: memory.Outlook(steps_ahead=5.0)
    loop.finish()
    (decided,) = loop.journal(CacheDecided)
    assert decided.mode == "computed" and "within 0.5 epochs" in decided.reason


# --- sentences -----------------------------------------------------------------------------------


class Sentences:
    """Batches of sentences, padded to the longest of each batch."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 24, (96,), generator=generator).tolist()
        self.words = [torch.randint(1, 50, (length,), generator=generator) for length in lengths]
        self.order = torch.Generator().manual_seed(1)

    def epoch(self):
        for rows in torch.randperm(96, generator=self.order).split(16):
            words = nn.utils.rnn.pad_sequence([self.words[row] for row in rows], batch_first=True)
            lengths = torch.tensor([len(self.words[row]) for row in rows])
            mask = (torch.arange(words.shape[1]) < lengths[:, None]).long()
            yield {"input_ids": words, "attention_mask": mask, "labels": lengths % 2}


def train_sentences(directory, enabled):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **shape))
    optimizer, data, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), Sentences(), []
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


def keys(num_rows=2, lengths=None, **kwargs):
    return row_keys(Batch.of_call((), kwargs, "cpu"), num_rows, lengths)


def padded(length):
    words = torch.zeros(2, length, dtype=torch.long)
    words[:, :3] = torch.tensor([[1, 2, 3], [4, 5, 0]])
    return {"input_ids": words, "attention_mask": (words != 0).long()}


def test_a_key_is_of_the_input_and_its_shape_without_what_padding_holds():
    lengths = torch.tensor([3, 2]).numpy()
    known = keys(lengths=lengths, **padded(7))
    otherwise = padded(7)
    otherwise["input_ids"][otherwise["attention_mask"] == 0] = 9
    assert keys(lengths=lengths, **otherwise) == known
    assert keys(lengths=lengths, **padded(7), num_items_in_batch=torch.tensor(9)) == known
    assert keys(**otherwise) != keys(**padded(7)), "without lengths padding counts"
    others = [
        padded(3),
        {**padded(7), "use_cache": False},
        {**padded(7), "scale": torch.tensor(2.0)},
        {**padded(7), "input_ids": padded(7)["input_ids"].int()},
        {"input_ids": padded(7)["attention_mask"], "attention_mask": padded(7)["input_ids"]},
    ]
    for other in others:
        assert not {*keys(lengths=lengths, **other)} & {*known}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not {*keys(lengths=lengths, **padded(7))} & {*known}
    assert keys(x=torch.ones(2, 3).to_sparse()) is None


@pytest.mark.parametrize("lengths", [None, (3, 1)])
def test_rows_come_back_as_they_were(lengths):
    store = RowMemory([None if lengths is None else 1, None], 2**20)
    rows = [torch.randn(2, 4, 3), torch.tensor([True, False])]
    lengths = None if lengths is None else torch.tensor(lengths).numpy()
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
    store = RowMemory([None], 2**26)
    for key in range(100):
        store.write([str(key).encode()], [torch.zeros(1, 2**18)], None)
    assert store.is_full and 2**25 < store.size_bytes <= 2**26
    assert 2**25 < sum(leaf.untyped_storage().nbytes() for block in store._blocks for leaf in block) <= 2**26
    store.close()
    assert store.size_bytes == 0 and len(store) == 0
    assert free_memory_bytes() > 2**20


def test_a_slower_iteration_with_stored_activations_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_forward, "REVIEWED_BATCHES", 8)
    loop = Loop(tmp_path)
    while not isinstance(loop.mode, MemoryForward):
        loop.epoch()
    loop.mode.is_reviewed = True
    loop.mode._times[False].extend([0.0] * memory_forward.MOST_TIMES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.finish()
    assert "an iteration with stored activations takes" in loop.journal(CacheDecided)[-1].reason
