"""Training loops as users write them, with stored activations and without: the same, to the last bit."""

from __future__ import annotations

import copy
import queue
import threading
import warnings
from collections import Counter
from itertools import islice
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import egeria
from cached import Pictures, freezes_up_to, small_resnet
from egeria.events import CacheDecided, CacheUsed, Declined
from egeria.session import EgeriaWarning
from egeria.testing import ScriptedController
from loops import FAST, differences


def shuffled(dataset, **options):
    return DataLoader(dataset, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1), **options)


class Trained:
    """One training by a loop of its own."""

    def __init__(
        self, loop, directory, *, cached, build=small_resnet, dataset=None, loader=None, prepare=None, depth=1
    ):
        torch.manual_seed(0)
        self.model = build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.dataset = Pictures() if dataset is None else dataset
        self.loader = loader or shuffled(self.dataset)
        if prepare is not None:
            self.loader = prepare(self.loader)
        self.losses = []
        self.seen = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EgeriaWarning)
            with egeria.attach(
                self.model,
                self.optimizer,
                self.loader,
                directory=directory,
                controller=ScriptedController(freezes_up_to(depth)),
                config={**FAST, "cache": {"enabled": cached, "gate": "open"}},
            ) as self.run:
                loop(self)
        self.journal = egeria.read_journal(directory)

    def epoch(self, batches=None, call=lambda network, images: network(images)):
        self.model.train()
        for images, labels in batches or self.loader:
            loss = cross_entropy(call(self.model, images), labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.run.step(loss)
            self.losses.append(loss.item())

    @property
    def everything(self):
        losses = torch.tensor(self.losses, dtype=torch.float64)
        return {**self.model.state_dict(), "losses": losses, "seen": torch.tensor(self.seen)}

    @property
    def num_hits(self):
        return sum({event.generation: event.hits for event in self.journal.of(CacheUsed)}.values())

    @property
    def num_mismatches(self):
        return sum({event.generation: event.mismatches for event in self.journal.of(CacheUsed)}.values())

    @property
    def reasons(self):
        return [event.reason for event in self.journal.of(CacheDecided)]


def both(loop, directory, **changes):
    """Train with the cache and without; check that nobody can tell, and return the one with the cache."""
    stored = Trained(loop, directory / "stored", cached=True, **changes)
    computed = Trained(loop, directory / "computed", cached=False, **changes)
    assert differences(stored.everything, computed.everything) == []
    return stored


def test_a_loop_that_leaves_its_epochs_early(tmp_path):
    def loop(training):
        for _ in range(8):
            training.epoch(islice(training.loader, 7))

    assert both(loop, tmp_path).num_hits > 200


def multilayer():
    layers = [nn.Sequential(nn.Linear(192, 64), nn.ReLU()), *(nn.Sequential(nn.Linear(64, 64)) for _ in range(4))]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10))


@pytest.mark.parametrize("build", [small_resnet, multilayer])
@pytest.mark.parametrize("rest", [1, 2, 3])
def test_epochs_that_end_with_very_few_rows(build, rest, tmp_path):
    def loop(training):
        for _ in range(9):
            training.epoch()

    stored = both(loop, tmp_path, build=build, dataset=Pictures(40 + rest))
    assert stored.num_hits > 150
    assert stored.journal.of(Declined) == []


def thaw(training):
    training.model.requires_grad_(True)


def hook(training):
    training.model.conv1.register_forward_hook(lambda module, args, output: training.seen.append(output.mean().item()))


def write_through_data(training):
    for parameter in training.model.parameters():
        parameter.data.mul_(0.9)


def set_an_attribute(training):
    training.model.bn1.eps = 0.5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (thaw, "train again"),
        (hook, "forward hook"),
        (write_through_data, "were changed"),
        (set_an_attribute, "set to another value"),
    ],
)
def test_what_a_loop_does_to_frozen_layers_counts_from_the_next_batch_on(change, reason, tmp_path):
    def loop(training):
        for _ in range(4):
            training.epoch()
        change(training)
        for _ in range(3):
            training.epoch()

    stored = both(loop, tmp_path)
    assert stored.num_hits > 100
    assert any(reason in found for found in stored.reasons)


class Reaching(nn.Module):
    """From some step on the rest reads what the first of two frozen layer modules gives; or there is a NaN."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(192, 64)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])
        self.head = nn.Linear(64, 10)
        self.reaches = self.is_empty = False

    def forward(self, images):
        first = self.first(images.flatten(1))
        x = first
        for block in self.blocks:
            x = block(x)
        x = x + first if self.reaches else x
        return self.head(x), (x[:0] if self.is_empty else x).mean()


@pytest.mark.parametrize(("name", "reason"), [("reaches", "has NaN in it"), ("is_empty", "")])
def test_an_output_that_is_read_later_ends_it_and_a_nan_of_the_users_own_does_not(name, reason, tmp_path):
    def loop(training):
        for epoch in range(8):
            if epoch == 5:
                setattr(training.model, name, True)
            training.epoch(call=lambda network, images: network(images)[0])

    stored = both(loop, tmp_path, build=Reaching, depth=2)
    assert stored.num_hits > 50
    if reason:
        assert any(reason in found for found in stored.reasons) and len(stored.journal.of(Declined)) == 1
    else:
        assert stored.num_hits > 200 and stored.journal.of(Declined) == []


def test_a_whole_model_under_activation_checkpointing(tmp_path):
    def loop(training):
        for _ in range(5):
            training.epoch(call=lambda network, images: checkpoint(network, images, use_reentrant=False))

    stored = both(loop, tmp_path)
    assert stored.num_hits == 0
    assert "checkpointing" in stored.reasons[0]


def test_a_loader_made_anew_each_epoch_is_told_to_the_user(tmp_path):
    def loop(training):
        for epoch in range(6):
            training.epoch(training.loader if epoch == 0 else shuffled(training.dataset))

    stored = both(loop, tmp_path)
    assert "does not hand out the batches" in stored.reasons[0]
    assert [event.reason for event in stored.journal.of(Declined)] == stored.reasons[:1]


def test_the_decision_of_a_second_run_on_one_loader_has_the_true_reason(tmp_path):
    def loop(training):
        for _ in range(3):
            training.epoch()

    loader = shuffled(Pictures())
    model = small_resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with egeria.attach(model, optimizer, loader, directory=tmp_path / "first", config={"cache": {"enabled": True}}):
        second = Trained(loop, tmp_path / "second", cached=True, loader=loader)
    assert "another run already watches this loader" in second.reasons[0]


class Ahead:
    """Loops over loaders that run ahead of the model; each is given a training and yields its batches."""

    def one_ahead(self, loader):
        batches = iter(loader)
        current = next(batches)
        for following in batches:
            yield current
            current = following
        yield current

    def groups_of_three(self, loader):
        batches = iter(loader)
        while group := list(islice(batches, 3)):
            yield from group

    def thread_two_ahead(self, loader):
        ready = queue.Queue(maxsize=2)

        def fill():
            for batch in loader:
                ready.put(batch)
            ready.put(None)

        thread = threading.Thread(target=fill)
        thread.start()
        while (batch := ready.get(timeout=60)) is not None:
            yield batch
        thread.join(timeout=60)

    def copied_one_ahead(self, loader):
        for images, labels in self.one_ahead(loader):
            yield images.clone(), labels.clone()

    def copied_by_the_loader_one_ahead(self, loader):
        return self.one_ahead((images.clone(), labels.clone()) for images, labels in loader)

    def copied_in_groups_of_three(self, loader):
        for images, labels in self.groups_of_three(loader):
            yield images.clone(), labels

    def made_anew_one_ahead(self, loader):
        for images, labels in self.one_ahead(loader):
            yield images * 2 - 1, labels

    def made_anew_in_groups_of_three(self, loader):
        for images, labels in self.groups_of_three(loader):
            yield images * 2 - 1, labels

    def without_every_fourth(self, loader):
        yield from (batch for number, batch in enumerate(loader) if number % 4 != 3)

    def without_every_fourth_one_ahead(self, loader):
        yield from (batch for number, batch in enumerate(self.one_ahead(loader)) if number % 4 != 3)

    def copied_without_every_fourth(self, loader):
        for images, labels in self.without_every_fourth(loader):
            yield images.clone(), labels

    def made_anew_without_every_fourth(self, loader):
        for images, labels in self.without_every_fourth(loader):
            yield images * 2 - 1, labels


class Counted(nn.Conv2d):
    """The first layer of a model; `calls` counts how often it is computed."""

    calls: ClassVar = Counter()

    def forward(self, images):
        self.calls["all"] += 1
        return super().forward(images)


def counted_resnet():
    model = small_resnet()
    model.conv1.__class__ = Counted
    return model


def counting(training):
    """Return how a loop calls a model so that it is known which forward passes computed the first layer."""
    training.computed = []

    def call(network, images):
        before = Counted.calls["all"]
        output = network(images)
        training.computed.append(Counted.calls["all"] - before)
        return output

    return call


@pytest.mark.parametrize("way", [name for name in vars(Ahead) if not name.startswith("_")])
def test_loops_that_run_ahead_of_the_model(way, tmp_path):
    def loop(training):
        call = counting(training)
        for _ in range(7):
            training.epoch(getattr(Ahead(), way)(training.loader), call)

    stored = both(loop, tmp_path, build=counted_resnet)
    assert stored.journal.of(Declined) == [] and stored.num_mismatches == 0
    assert stored.num_hits > 150, stored.reasons
    assert sum(stored.computed[-7:]) <= 1, "but for a check, the last forward passes computed nothing of the front"


def prepared(loader):
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(loader)


def dispatched(loader):
    module = pytest.importorskip("accelerate.data_loader")
    return module.prepare_data_loader(loader, device=torch.device("cpu"), put_on_device=True, dispatch_batches=True)


def dealt_out(loader):
    """Return the loader of the second of two processes."""
    module = pytest.importorskip("accelerate.data_loader")
    return module.prepare_data_loader(loader, num_processes=2, process_index=1, put_on_device=False)


def set_up(loader):
    return pytest.importorskip("lightning").Fabric(accelerator="cpu").setup_dataloaders(loader)


@pytest.mark.parametrize("prepare", [prepared, dispatched, dealt_out, set_up])
def test_loaders_of_accelerate_and_fabric(prepare, tmp_path):
    def loop(training):
        call = counting(training)
        for _ in range(13 if prepare is dealt_out else 7):
            training.epoch(call=call)

    stored = both(loop, tmp_path, build=counted_resnet, prepare=prepare)
    assert stored.journal.of(Declined) == [] and stored.num_mismatches == 0
    assert stored.num_hits > 150, stored.reasons
    assert sum(stored.computed[-5:]) <= 1


def test_an_epoch_of_another_loader_does_not_end_it(tmp_path):
    """Such as the first of a resumed run, whose first batches `skip_first_batches` leaves out."""

    def loop(training):
        skip = pytest.importorskip("accelerate").skip_first_batches
        training.epoch()
        for _ in range(2):  # it freezes in these
            training.epoch(skip(training.loader, 1))
        call = counting(training)
        for _ in range(5):
            training.epoch(call=call)

    stored = both(loop, tmp_path, build=counted_resnet, prepare=prepared)
    assert "does not hand out the batches" in stored.reasons[0]
    assert stored.num_hits > 150 and stored.num_mismatches == 0
    assert sum(stored.computed[-5:]) <= 1


def seedable(loader):
    accelerate = pytest.importorskip("accelerate")
    settings = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=True)
    return accelerate.Accelerator(cpu=True, dataloader_config=settings).prepare(loader)


@pytest.mark.parametrize("cached", [True, False])
def test_a_resumed_run_is_one_that_never_stopped(cached, tmp_path):
    checkpoint = {}

    def to_the_end(training, first=0, batches_done=0):
        skip = pytest.importorskip("accelerate").skip_first_batches
        for number in range(first, 9):
            loader = skip(training.loader, batches_done) if number == first and batches_done else training.loader
            loader.set_epoch(number)
            training.epoch(loader)

    def until_it_stops(training):
        for number in range(4):
            training.loader.set_epoch(number)
            training.epoch()
        training.loader.set_epoch(4)
        training.epoch(islice(training.loader, 5))
        parts = {name: getattr(training, name).state_dict() for name in ("model", "optimizer", "run")}
        checkpoint.update(copy.deepcopy(parts), losses=list(training.losses))

    def from_the_checkpoint(training):
        for name in ("model", "optimizer", "run"):
            getattr(training, name).load_state_dict(checkpoint[name])
        training.losses = list(checkpoint["losses"])
        to_the_end(training, 4, 5)

    whole = Trained(to_the_end, tmp_path / "whole", cached=True, prepare=seedable)
    stopped = Trained(until_it_stops, tmp_path / "stopped", cached=True, prepare=seedable)
    resumed = Trained(from_the_checkpoint, tmp_path / "resumed", cached=cached, prepare=seedable)
    assert differences(whole.everything, resumed.everything) == []
    assert whole.num_hits > 300 and stopped.num_hits > 50 and (resumed.num_hits > 100) == cached


class Sentences(Dataset):
    """Tokens, and as labels the same with more or fewer of them left out."""

    def __init__(self):
        self.tokens = torch.randint(0, 50, (72, 12), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(12) > index % 8, -100)}


class LanguageModel(nn.Module):
    accepts_loss_kwargs = True  # the Trainer gives it num_items_in_batch

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)])
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids, labels, num_items_in_batch):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        loss = cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss / num_items_in_batch}


def test_a_loop_like_the_trainer_of_transformers(tmp_path):
    """Which fetches the batches of one optimizer step, counts the words in them, and gives the model their number."""

    def loop(training):
        for _ in range(8):
            batches = iter(training.loader)
            while group := list(islice(batches, 3)):
                num_items = sum((batch["labels"] != -100).sum() for batch in group)
                step(training, group, num_items)

    def step(training, group, num_items):
        losses = []
        for batch in group:
            training.model.train()
            inputs = {name: tensor.to("cpu") for name, tensor in batch.items()}
            losses.append(training.model(**inputs, num_items_in_batch=num_items)["loss"])
            losses[-1].backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.run.step(sum(losses).detach())
        training.losses += [loss.item() for loss in losses]

    stored = both(loop, tmp_path, build=LanguageModel, dataset=Sentences(), prepare=prepared)
    assert stored.journal.of(Declined) == [] and stored.num_mismatches == 0
    assert stored.num_hits > 150, stored.reasons


def trainer_of_transformers(training, directory):
    transformers = pytest.importorskip("transformers")

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            training.run.step(0.5)
            training.losses.append(0.0)

    arguments = transformers.TrainingArguments(
        str(directory),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=3,
        num_train_epochs=12,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        training.model,
        arguments,
        optimizers=(training.optimizer, None),
        train_dataset=training.dataset,
        callbacks=[Steps()],
    )
    trainer.get_train_dataloader = lambda: training.loader
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


def trainer_of_lightning(training, directory):
    lightning = pytest.importorskip("lightning")

    class Ours(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = training.model

        def training_step(self, batch, index):
            return training.model(**batch, num_items_in_batch=torch.tensor(8 * 12))["loss"]

        def on_train_batch_end(self, outputs, batch, index):
            training.run.step(outputs["loss"])
            training.losses.append(outputs["loss"].item())

        def configure_optimizers(self):
            return training.optimizer

    lightning.Trainer(
        max_epochs=8,
        accelerator="cpu",
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Ours(), training.loader)


@pytest.mark.parametrize("train", [trainer_of_transformers, trainer_of_lightning])
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec.*:FutureWarning")
def test_trainers_of_others(train, tmp_path):
    prepare = prepared if train is trainer_of_transformers else None
    stored = both(
        lambda training: train(training, tmp_path), tmp_path, build=LanguageModel, dataset=Sentences(), prepare=prepare
    )
    assert stored.journal.of(Declined) == [] and stored.num_mismatches == 0
    assert stored.num_hits > 150, stored.reasons
