"""The gate in a training: what it measures, and what it decides. Delays that dominate stand for slow parts."""

from __future__ import annotations

import time

import pytest
from examples.resnet import cifar_resnet
from torch import nn

from cached import Training, nothing_but_journals
from egeria.cache.forward_modes import WATCHED_FORWARDS, PlainForward
from egeria.cache.generation import Generation
from egeria.cache.store import disk as store
from egeria.events import CacheDecided

pytestmark = pytest.mark.slow  # on a busy machine what it times is otherwise
BATCHES = 4
NUMBERS = {"iteration_s", "prefix_s", "serve_s", "epochs_ahead"}


class Slow(nn.Module):
    """Takes its time in training, and changes nothing."""

    seconds = 0.0

    def forward(self, x):
        time.sleep(self.seconds)
        return x


def network():
    """Return a network that can be slow in its first and in its last layer module."""
    model = cifar_resnet(8)
    model.layer1[0].bn2 = nn.Sequential(model.layer1[0].bn2, Slow())
    model.linear = nn.Sequential(model.linear, Slow())
    return model


def train(tmp_path, *, depth=2, front_s=0.0, back_s=0.0, **settings):
    """Train until the gate has decided behind a boundary; the second of two is the last."""
    training = Training(
        tmp_path,
        depth=depth,
        batch_size=80 // BATCHES,
        epochs=20,
        build=network,
        settings={"gate": "auto", **settings},
    )
    while training.run.frozen < depth:
        training.advance(1)
    training.model.layer1[0].bn2[1].seconds = front_s
    training.model.linear[1].seconds = back_s
    training.advance(WATCHED_FORWARDS + 2)
    return training


def last_decision(training):
    """Return what was decided behind the last boundary, before the end."""
    training.close()
    decided = [event for event in training.journal(CacheDecided) if event.boundary]
    assert decided[-1].numbers.keys() >= NUMBERS
    return decided[-1]


def test_a_dear_prefix_is_stored(tmp_path):
    with nothing_but_journals(tmp_path):
        training = train(tmp_path, front_s=0.1)
        assert isinstance(training.way, Generation)
        training.advance(2 * BATCHES)
        assert training.generation.use.hits > 0
        decided = last_decision(training)
    assert decided.mode == "stored"
    assert "saves" in decided.reason
    assert decided.numbers["prefix_s"] >= 0.1 > decided.numbers["read_s"]
    assert decided.numbers["gain_s"] > 0 and decided.numbers["total_gain_s"] > 0
    assert training.warnings == []


def test_behind_a_slow_disk_the_prefix_is_computed(tmp_path, monkeypatch):
    read = store.DiskStore.read

    def slowly(*call):
        time.sleep(0.3)
        return read(*call)

    monkeypatch.setattr(store.DiskStore, "read", slowly)
    with nothing_but_journals(tmp_path):
        training = train(tmp_path, front_s=0.05)
        assert type(training.way) is PlainForward
        assert list((tmp_path / "cache").rglob("leaf-*.bin")) == []
        decided = last_decision(training)
    assert "reading a batch from the disk takes" in decided.reason
    assert decided.numbers["read_s"] >= 0.3
    assert training.num_hits == 0 and training.warnings == []


def test_a_tiny_prefix_is_not_stored(tmp_path):
    with nothing_but_journals(tmp_path):
        training = train(tmp_path, back_s=0.2)
        assert type(training.way) is PlainForward
        assert not (tmp_path / "cache").exists(), "the disk is not even looked at"
        decided = last_decision(training)
    assert "the frozen forward pass takes" in decided.reason
    assert decided.numbers["prefix_s"] < 0.02 * decided.numbers["iteration_s"] + decided.numbers["serve_s"]
    assert training.num_hits == 0 and training.warnings == []


def test_a_boundary_that_may_move_soon_is_not_stored(tmp_path):
    with nothing_but_journals(tmp_path):
        training = train(tmp_path, depth=1)  # six steps to the next freeze: one epoch and a half
        decided = last_decision(training)
    assert decided.mode == "computed"
    assert "within 1.5 epochs" in decided.reason


def test_it_decides_anew_at_each_boundary(tmp_path):
    with nothing_but_journals(tmp_path):
        training = train(tmp_path, front_s=0.05, depth=1)
        training.run._session.parts.evaluation.controller.readings = lambda evaluation, module: 1.0
        while training.run.frozen < 2:
            training.advance(1)
        training.advance(WATCHED_FORWARDS + 2)
        training.close()
    decided = [(event.boundary, event.generation, event.mode) for event in training.journal(CacheDecided)]
    assert decided[:2] == [("layer1.0", 1, "computed"), ("layer2.0", 2, "stored")]
