"""Training the predictor of 'smartfrz': its labels, and the command on toys."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.proving.studies.smartfrz import Examples, Labelling, Threshold, Watched, fit, judge, without_each
from tests.pieces import COMMON

from egeria.smartfrz import NUM_SNAPSHOTS, NUM_WEIGHTS, load_predictor

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]


def test_a_module_may_freeze_once_it_has_been_like_the_trained_one_for_a_while():
    labelling = Labelling(span=3, most_variance=1e-4, least_cka=0.3)
    assert labelling.label([0.5, 0.9, 0.9, 0.905, 0.91]) == [False, False, False, True, True]
    assert labelling.label([0.2] * 4) == [False] * 4, "it stays, but is not like it"
    assert labelling.label([0.9] * 3) == [False, False, True], "of fewer intervals nothing is known"
    assert labelling.label([0.9, 0.9, 0.9, 0.6, 0.9, 0.9, 0.9]) == [False, False, True, False, False, False, True]


def watched(workload, seed, count=24, modules=2):
    """Modules that move by much in the first half of the intervals, and hardly in the second."""
    draw = torch.Generator().manual_seed(seed)
    base = torch.randn(count, modules, 1, NUM_WEIGHTS, generator=draw)
    steps = torch.randn(count, modules, NUM_SNAPSHOTS, NUM_WEIGHTS, generator=draw)
    size = torch.where(torch.arange(count) < count // 2, 0.5, 0.001)[:, None, None, None]
    cka = torch.where(torch.arange(count) < count // 2, 0.1, 0.95)[:, None].repeat(1, modules)
    return Watched(workload=workload, seed=seed, windows=base + size * steps, cka=cka)


def test_it_learns_to_tell_what_moves_from_what_does_not():
    examples = Examples.of([watched("one", seed) for seed in range(6)], Labelling(span=1))
    assert examples.share == 0.5 and len(examples.labels) == 6 * 48
    verdict = judge(fit(examples, seed=0, epochs=6), Examples.of([watched("two", 9)], Labelling(span=1)))
    assert verdict.right > 0.9 and verdict.balanced > 0.9 and verdict.num_examples == 48
    assert verdict.common == 0.5
    rule = Threshold.fit(examples)
    assert judge(rule, Examples.of([watched("two", 9)], Labelling(span=1))).right == 1 and 0.001 < rule.most < 1


def test_windows_without_weights_that_train_are_left_out():
    found = watched("one", 0)
    found.windows[:, 1] = torch.nan
    examples = Examples.of([found], Labelling(span=1))
    assert len(examples.labels) == len(examples.windows) == 24 and examples.windows.isfinite().all()


def test_each_network_is_left_out_once():
    found = [watched(name, seed, count=2) for name in ("one", "two") for seed in (0, 1)]
    parts = list(without_each(found))
    assert [name for name, *_ in parts] == ["one", "two"]
    assert [[entry.workload for entry in own] for _, _, own in parts] == [["one", "one"], ["two", "two"]]
    assert list(without_each(found[:2])) == []


def test_the_command_watches_each_training_once_and_writes_predictor_and_card(tmp_path, capfd):
    place = ["--results", str(tmp_path / "results"), "--data", str(tmp_path), "--seeds", "0,1"]
    out = tmp_path / "out"
    assert main(["smartfrz", "toy-narrow,toy", *COMMON, *place, "--jobs", "2"]) == 0
    kept = sorted((tmp_path / "results").rglob("*.safetensors"))
    assert len(kept) == 4 and "epoch 5/5" in capfd.readouterr().out
    seen = Watched.load(kept[0])
    assert (seen.workload, seen.seed) == ("toy", 0)
    assert seen.windows.shape[:2] == seen.cka.shape and float(seen.cka.max()) <= 1 + 1e-5
    assert (
        main(["smartfrz", "toy-narrow,toy", *COMMON, *place, "--held-out", "1", "--epochs", "1", "--out", str(out)])
        == 0
    )
    assert "epoch 5/5" not in capfd.readouterr().out, "nothing is trained again"
    results = json.loads((out / "results.json").read_text())
    assert results["workloads"] == ["toy-narrow", "toy"] and results["held_out_seeds"] == [1]
    assert set(results["on_networks"]) == {"toy-narrow", "toy"} and len(results["on_seeds"]) == 3
    assert load_predictor(out / "predictor.safetensors").score(seen.windows[0])
    card = (out / "CARD.md").read_text()
    assert "seeds 0:" in card and "--held-out 1" in card and "toy, trained without it" in card


@pytest.mark.parametrize("held_out", [["--held-out", "2"], ["--held-out", "0,1"], []])
def test_what_is_held_out_must_leave_something_to_train_on(held_out, tmp_path, capsys):
    place = ["--results", str(tmp_path / "results"), "--data", str(tmp_path), "--seeds", "0,1", "--out", str(tmp_path)]
    assert main(["smartfrz", "toy-narrow", *COMMON, *place, *held_out]) == 2
    assert "some of --seeds and not all" in capsys.readouterr().err
    assert not (tmp_path / "results").exists(), "before anything is trained"


def test_a_training_that_cannot_be_made_ends_the_others(tmp_path, capsys):
    place = ["--results", str(tmp_path / "results"), "--data", str(tmp_path), "--seeds", "0"]
    assert main(["smartfrz", "no-data,toy", *COMMON, *place]) == 2
    assert "benchmarks: " in capsys.readouterr().err
    assert not list((tmp_path / "results").rglob("*.safetensors"))
