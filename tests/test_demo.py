"""`examples/demo.py`: a fine-tuning without egeria and with it, side by side."""

import sys

import pytest
import torch
from torch.utils.data import TensorDataset

import demo
import egeria
from egeria import events


def run_demo(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, arguments)])
    demo.main()


@pytest.fixture
def few_digits(monkeypatch):
    """Made-up digits in place of scikit-learn's: the demo runs in seconds."""
    generator = torch.Generator().manual_seed(0)

    def some(count):
        images = torch.randn(count, 1, 16, 16, generator=generator)
        return TensorDataset(images, torch.randint(0, 5, (count,), generator=generator))

    given = [(some(128), some(32)) for _ in range(2)]
    monkeypatch.setattr(demo, "load_digits", lambda: given)
    monkeypatch.setattr(demo.pretrain, "__kwdefaults__", {"epochs": 1})


def test_the_demo_compares_plain_training_with_egeria(few_digits, monkeypatch, capsys, tmp_path):
    run_demo(monkeypatch, "--seeds", 1, "--epochs", 4, "--directory", tmp_path / "out")
    output = capsys.readouterr().out
    runs = [line.split() for line in output.splitlines() if line.startswith("  seed 0")]
    assert [line[2] for line in runs] == ["plain", "egeria"] and all("CPU" in line for line in runs)
    assert "frozen at epoch: " in output and "% of the CPU time saved" in output
    assert str(tmp_path / "out" / "seed0" / "report.html") in output
    journal = egeria.read_journal(tmp_path / "out" / "seed0")
    assert journal.num_damaged == 0
    assert [event.step for event in journal.of(events.MetricLogged)] == [4, 6, 8]
    assert (tmp_path / "out" / "seed0" / "report.html").is_file()
    with pytest.raises(SystemExit):  # an earlier demo is not deleted
        run_demo(monkeypatch, "--seeds", 1, "--epochs", 4, "--directory", tmp_path / "out")
    assert "holds an earlier demo" in capsys.readouterr().err
