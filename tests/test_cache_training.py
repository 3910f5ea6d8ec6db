"""Training with stored activations where more is in play: augmentation, workers, mixed precision, padding."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import egeria
from cached import Pictures, Training, assert_equal, nothing_but_journals, plain, small_resnet
from egeria.cache import generation
from egeria.events import CacheDecided, CacheUsed, Declined
from egeria.session import EgeriaWarning
from egeria.skipping.prefix import Prefix
from egeria.testing import ScriptedController
from loops import FAST, differences


class Augmented(Pictures):
    """Pictures flipped and shifted at random, by torch's generator and by Python's."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        image = image.flip(-1) if random.random() < 0.5 else image
        return image.roll(int(torch.randint(0, 3, ())), dims=-1), label


def augmented(directory, **changes):
    """Return a training on augmented pictures that begins with the random numbers of every other one."""
    random.seed(0)
    return Training(directory, dataset=Augmented(), **changes)


def without_hits(monkeypatch):
    """Let every sample count as one that is not stored."""
    monkeypatch.setattr(generation, "agree", lambda first, second: (first == second).all(axis=-1) & False)
    monkeypatch.setattr(generation, "STRANGE_BATCHES", 10**9)


@pytest.mark.parametrize("views", [1, 2])
def test_with_the_augmentation_fixed_stored_is_computed(views, tmp_path, monkeypatch):
    settings = {"views": views, "verify_batches": 3}
    with nothing_but_journals(tmp_path):
        stored = augmented(tmp_path / "stored", epochs=10, settings=settings)
        stored.finish()
        without_hits(monkeypatch)
        computed = augmented(tmp_path / "computed", epochs=10, settings=settings)
        computed.finish()
    assert stored.num_hits > 100 and computed.num_hits == 0
    assert stored.modes[0] == "stored"
    assert_equal(stored, computed)


def test_random_inputs_are_noticed_and_get_two_views(tmp_path):
    training = augmented(tmp_path, epochs=12)
    training.finish()
    decided = training.journal(CacheDecided)
    assert [event.numbers["num_views"] for event in decided if event.mode == "stored"][-1] == 2
    assert training.num_hits > 100
    assert training.warnings == []


def test_free_augmentation_stores_nothing_and_is_what_the_user_wrote(tmp_path):
    training = augmented(tmp_path / "free", settings={"views": 0})
    training.finish()
    assert set(training.modes) == {"computed"}
    assert "augmentation stays free" in training.journal(CacheDecided)[0].reason
    without = augmented(tmp_path / "without", cached=False)
    without.finish()
    assert_equal(without, training)


def test_batches_that_what_is_stored_does_not_fit_are_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(Prefix, "fits", lambda *_: False)  # such as padded to a length that cannot be cut
    training = Training(tmp_path / "unfit")
    training.finish()
    assert training.modes[0] == "stored" and training.num_hits == 0
    assert training.journal(Declined) == [] and training.journal(CacheUsed)[-1].checks == 0
    without = Training(tmp_path / "without", cached=False)
    without.finish()
    assert_equal(without, training)


def test_little_room_serves_what_fits(tmp_path):
    training = Training(tmp_path / "part", settings={"limit_bytes": 30 * 2**12 + 2**13, "verify_batches": 5})
    training.finish()
    (numbers,) = (event.numbers for event in training.journal(CacheDecided) if event.mode == "stored")
    assert 0.2 < numbers["stored_share"] < 0.8
    used = training.journal(CacheUsed)[-1]
    assert 0 < used.hits < used.misses + used.hits and used.size_bytes <= 30 * 2**12 + 2**13
    assert used.checks >= 3, "what is there is checked, though rows are missing in every batch"
    assert_equal(plain(tmp_path), training)


@pytest.mark.parametrize("storage", ["fp16", "int8"])
def test_a_smaller_storage_is_close_and_checked(storage, tmp_path):
    training = Training(tmp_path / storage, settings={"storage": storage, "verify_batches": 2})
    training.finish()
    reference = plain(tmp_path)
    used = training.journal(CacheUsed)[-1]
    assert used.hits > 100 and used.checks > 1 and 0 < used.largest_error < generation.ROUNDING[storage]
    assert torch.tensor(training.losses).allclose(torch.tensor(reference.losses), rtol=0.05, atol=0.02)


# --- other loops -----------------------------------------------------------------------------------


def train(make_model, loader, step, directory, enabled, epochs=8):
    """Train in a loop of its own; return everything that changed and the journal."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EgeriaWarning)
        run = egeria.attach(
            model,
            optimizer,
            loader,
            directory=directory,
            controller=ScriptedController(lambda evaluation, module: 1.0 if module == 0 else 2.0**evaluation),
            config={**FAST, "cache": {"enabled": enabled, "gate": "open", "verify_batches": 5}},
        )
    with run:
        for _ in range(epochs):
            model.train()
            for batch in loader:
                loss = step(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
                losses.append(loss.item())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return {**state, "losses": torch.tensor(losses, dtype=torch.float64)}, egeria.read_journal(directory)


def classify(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def ordered(dataset, **options):
    return DataLoader(dataset, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1), **options)


@pytest.mark.parametrize("persistent", [False, True])
def test_with_workers_the_future_is_known_and_training_is_the_same(persistent, tmp_path):
    results = []
    for enabled in (False, True):
        loader = ordered(Pictures(), num_workers=2, persistent_workers=persistent)
        results.append(train(small_resnet, loader, classify, tmp_path / str(enabled), enabled))
        del loader
    assert differences(results[0][0], results[1][0]) == []
    used = results[1][1].of(CacheUsed)[-1]
    assert used.hits > 200 and used.stalls < used.batches / 2


def test_under_autocast_in_channels_last_activations_keep_type_and_layout(tmp_path):
    def step(model, batch):
        images, labels = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nn.functional.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)

    def build():
        return small_resnet().to(memory_format=torch.channels_last)

    results = [train(build, ordered(Pictures()), step, tmp_path / str(enabled), enabled) for enabled in (False, True)]
    assert differences(results[0][0], results[1][0]) == []
    used = results[1][1].of(CacheUsed)[-1]
    assert used.hits > 200 and used.largest_error == 0


class Sentences(Dataset):
    """Sentences of several lengths."""

    def __init__(self):
        random_ = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 12, (80,), generator=random_).tolist()
        self.words = [torch.randint(1, 50, (length,), generator=random_) for length in lengths]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return self.words[index]


def padded(sentences):
    words = pad_sequence(sentences, batch_first=True)
    lengths = torch.tensor([len(sentence) for sentence in sentences])
    mask = (torch.arange(words.shape[1]) < lengths[:, None]).long()
    return {"input_ids": words, "attention_mask": mask, "labels": lengths % 2}


def test_sentences_are_stored_at_their_length_and_padded_again(tmp_path):
    transformers = pytest.importorskip("transformers")

    def build():
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32
        )
        return transformers.BertForSequenceClassification(config)

    results = [
        train(
            build,
            ordered(Sentences(), collate_fn=padded),
            lambda model, batch: model(**batch).loss,
            tmp_path / str(enabled),
            enabled,
        )
        for enabled in (False, True)
    ]
    used = results[1][1].of(CacheUsed)[-1]
    assert used.hits > 200
    assert results[0][0]["losses"].allclose(results[1][0]["losses"], rtol=1e-3)


class Front(nn.Module):
    """Averages words, those of the padding too unless it is masked."""

    def __init__(self, is_masked):
        super().__init__()
        self.embedding, self.is_masked = nn.Embedding(50, 16), is_masked

    def forward(self, words, mask):
        counted = mask[..., None] if self.is_masked else torch.ones_like(mask)[..., None]
        return (self.embedding(words) * counted).sum(1) / counted.sum(1)


class Averaging(nn.Module):
    def __init__(self, is_masked):
        super().__init__()
        self.front = Front(is_masked)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)])
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask, labels):
        x = self.front(input_ids, attention_mask)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize(("is_masked", "least", "most"), [(True, 400, 640), (False, 10, 350)])
def test_the_length_of_a_batch_counts_unless_padding_is_proven_not_to(is_masked, least, most, tmp_path):
    results = [
        train(
            lambda: Averaging(is_masked),
            ordered(Sentences(), collate_fn=padded),
            lambda model, batch: model(**batch),
            tmp_path / str(enabled),
            enabled,
        )
        for enabled in (False, True)
    ]
    assert results[0][0]["losses"].allclose(results[1][0]["losses"], rtol=1e-5)
    assert least < results[1][1].of(CacheUsed)[-1].hits < most


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = Scaling()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)])
        self.head = nn.Linear(64, 10)

    def forward(self, images, scale):
        x = self.front(images, scale)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(192, 64)

    def forward(self, images, scale):
        return scale * self.inner(images.flatten(1))


def test_plain_arguments_count(tmp_path):
    """Two epochs with one scale, two with another."""

    def run(enabled):
        steps = iter(range(1000))

        def step(model, batch):
            images, labels = batch
            return nn.functional.cross_entropy(model(images, scale=1.0 + next(steps) // 20 % 2), labels)

        return train(Scaled, ordered(Pictures()), step, tmp_path / str(enabled), enabled, epochs=10)

    results = [run(enabled) for enabled in (False, True)]
    assert differences(results[0][0], results[1][0]) == []
    assert results[1][1].of(CacheUsed)[-1].hits > 100
