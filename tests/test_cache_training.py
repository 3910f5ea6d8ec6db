"""Training with stored activations where more is in play: augmentation, workers, mixed precision, padding."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import cached
import egeria
from cached import Pictures, Training, assert_equal, nothing_but_journals, plain, small_resnet
from egeria.events import CacheDecided, CacheUsed, Declined, ModuleFrozen
from egeria.session import EgeriaWarning
from egeria.skipping.prefix import Prefix
from egeria.testing import ScriptedController
from loops import FAST, differences


class Augmented(Pictures):
    """Pictures of which a share is flipped at random."""

    share = 0.5

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image.flip(-1) if random.random() < self.share else image, label


def late_second_freeze(_depth):
    """Return readings by which the second layer module freezes after the first has been served for some epochs."""
    return lambda evaluation, module: 1.0 if module == 0 or (module == 1 and evaluation > 50) else 2.0**evaluation


@pytest.mark.parametrize("share", [0.5, 0.15])
def test_where_inputs_are_augmented_at_random_the_cache_is_off_and_says_so(share, tmp_path, monkeypatch):
    monkeypatch.setattr(Augmented, "share", share)
    monkeypatch.setattr(cached, "freezes_up_to", late_second_freeze)
    trainings = []
    with nothing_but_journals(tmp_path):
        for is_cached in (True, False):
            random.seed(0)
            trainings.append(Training(tmp_path / str(is_cached), is_cached, epochs=12, dataset=Augmented()))
            trainings[-1].finish()
    stored, without = trainings
    assert_equal(stored, without)
    assert len(stored.warnings) == len(stored.complaints) == 1 and "augmented at random" in stored.complaints[0]
    assert len(stored.journal(ModuleFrozen)) == 2
    assert stored.modes == ["stored", *["computed"] * 2], "nothing is stored behind the second freeze"


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
