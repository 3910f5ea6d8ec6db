"""When storing activations pays: the gate, by numbers alone."""

import dataclasses
import itertools
from collections import namedtuple

from egeria.cache import forward_modes
from egeria.cache.gate import Prospects, judge

Verdict = namedtuple("Verdict", "pays reason")
GOOD = Prospects(
    iteration_s=0.2,
    prefix_s=0.06,
    serve_s=0.002,
    read_s=0.004,
    read_cpu_s=0.002,
    fill_s=0.005,
    batch_bytes=2**22,
    needed_bytes=2**30,
    room_bytes=2**32,
    epochs_ahead=10.0,
)


def verdict(minimum_epochs=2.0, **changes):
    return Verdict(*judge(dataclasses.replace(GOOD, **changes), minimum_epochs=minimum_epochs))


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


def test_on_one_core_reading_is_work_too():
    assert verdict(read_cpu_s=0.059).pays
    assert not verdict(read_cpu_s=0.059, spare_core=False).pays


def test_two_epochs_must_be_ahead():
    found = verdict(epochs_ahead=1.9)
    assert not found.pays
    assert "within 1.9 epochs" in found.reason
    assert verdict(epochs_ahead=2.0).pays
    assert not verdict(epochs_ahead=2.0, minimum_epochs=3.0).pays


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
