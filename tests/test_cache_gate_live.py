"""The gate in a training: what it measures, and what it decides. Delays that dominate stand for slow parts."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import namedtuple

import pytest
from examples.resnet import cifar_resnet
from torch import nn

from cached import Training, nothing_but_journals
from egeria.cache import Outlook, forward_modes
from egeria.cache.forward_modes import WATCHED_FORWARDS, PlainForward
from egeria.cache.gate import Prospects, judge
from egeria.cache.generation import Generation
from egeria.cache.store import disk as store
from egeria.events import CacheDecided
from egeria.session import skipping

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
        decided = last_decision(training)
    assert "reading a batch from the disk takes" in decided.reason
    assert decided.numbers["read_s"] >= 0.3
    assert training.num_hits == 0 and training.warnings == []


def test_a_tiny_prefix_is_not_stored(tmp_path):
    with nothing_but_journals(tmp_path):
        training = train(tmp_path, back_s=0.2)
        assert type(training.way) is PlainForward
        decided = last_decision(training)
    assert "the frozen forward pass takes" in decided.reason
    assert decided.numbers["prefix_s"] < 0.02 * decided.numbers["iteration_s"] + decided.numbers["serve_s"]
    assert training.num_hits == 0 and training.warnings == []


def test_a_boundary_that_may_move_soon_is_not_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(skipping, "Outlook", lambda **_: Outlook(steps_ahead=1.5 * BATCHES))
    with nothing_but_journals(tmp_path):
        training = train(tmp_path, depth=1)
        decided = last_decision(training)
    assert decided.mode == "computed"
    assert "within 1.5 epochs, and storing takes at least 2 to pay" in decided.reason


def test_it_decides_anew_at_each_boundary(tmp_path):
    with nothing_but_journals(tmp_path):
        training = train(tmp_path, front_s=0.05, depth=1)
        training.run._session.parts.evaluation.controller.readings = lambda evaluation, module: 1.0
        while training.run.frozen < 2:
            training.advance(1)
        training.advance(WATCHED_FORWARDS + 2)
        training.close()
    decided = [(event.boundary, event.generation, event.mode) for event in training.journal(CacheDecided)]
    assert decided[0][:2] == ("layer1.0", 1) and ("layer2.0", 2, "stored") in decided


Verdict = namedtuple("Verdict", "pays reason")
GOOD = Prospects(
    iteration_s=0.2,
    prefix_s=0.06,
    serve_s=0.002,
    read_s=0.004,
    fill_s=0.005,
    needed_bytes=2**30,
    room_bytes=2**32,
    epochs_ahead=10.0,
)


def verdict(is_in_memory=False, **changes):
    return Verdict(*judge(dataclasses.replace(GOOD, **changes), is_in_memory=is_in_memory))


def test_it_pays_where_the_prefix_is_dear_and_the_disk_is_fast():
    found = verdict()
    assert found.pays
    assert "29%" in found.reason  # 0.06 s less 0.002 s of 0.2 s


def test_a_tiny_prefix_is_computed():
    found = verdict(prefix_s=0.004)
    assert not found.pays
    assert "4.00 ms of an iteration of 200.0 ms" in found.reason


def test_a_slow_disk_is_left_alone():
    found = verdict(read_s=0.5)
    assert not found.pays
    assert "reading a batch from the disk takes 500.0 ms" in found.reason


def test_a_disk_slower_than_the_shortened_iteration_still_pays_while_it_beats_the_whole_one():
    assert verdict(read_s=0.17).pays
    assert not verdict(read_s=0.199).pays


def test_two_epochs_must_be_ahead():
    found = verdict(epochs_ahead=1.9)
    assert not found.pays
    assert "within 1.9 epochs" in found.reason
    assert verdict(epochs_ahead=2.0).pays
    assert verdict(epochs_ahead=1.2, is_in_memory=True).pays and not verdict(epochs_ahead=1.1, is_in_memory=True).pays


def test_filling_must_be_repaid():
    found = verdict(epochs_ahead=2.0, fill_s=0.07)
    assert not found.pays
    assert "filling" in found.reason
    assert verdict(epochs_ahead=4.0, fill_s=0.07).pays


def test_a_small_disk_holds_a_part():
    assert verdict(room_bytes=2**29).pays
    found = verdict(room_bytes=2**26)
    assert not found.pays
    assert "1.0 GiB, and 64.0 MiB may be used" in found.reason


def test_a_part_that_fits_brings_that_part_of_the_gain():
    whole, half = GOOD, dataclasses.replace(GOOD, room_bytes=2**29)
    assert half.stored_share == 0.5
    assert abs(half.total_gain_s - whole.total_gain_s / 2) < 1e-12


def test_the_numbers_are_told():
    numbers = GOOD.to_dict()
    assert {"iteration_s", "prefix_s", "serve_s", "read_s", "fill_s", "epochs_ahead", "stored_share"} <= numbers.keys()
    assert all(isinstance(value, float) for value in numbers.values())


def served(monkeypatch, iteration_s, count=forward_modes.REVIEWED_BATCHES + 1, every=lambda index: True):
    """Iterations of 10 ms; return what is said of them after each."""
    clock = itertools.count(0.0, 0.01)
    monkeypatch.setattr(forward_modes.time, "perf_counter", lambda: next(clock))
    payback = forward_modes.PaybackCheck(iteration_s)
    said = []
    for index in range(count):
        payback.note(every(index))
        said.append(payback.complaint())
    return said


def test_stored_activations_that_do_not_shorten_iterations_are_given_up(monkeypatch):
    said = served(monkeypatch, iteration_s=0.009)
    assert said[-1] == "an iteration with stored activations takes 10.0 ms, and took 9.0 ms with computed ones"
    assert not any(said[:-1])


def test_those_that_do_are_kept(monkeypatch):
    assert not any(served(monkeypatch, iteration_s=0.011, count=300))


def test_iterations_with_computed_rows_prove_nothing(monkeypatch):
    assert not any(served(monkeypatch, iteration_s=0.001, count=300, every=lambda index: index % 2 == 0))
    assert not any(served(monkeypatch, iteration_s=0.0, count=300))
