"""A run whose directory is a URL: what the store has, when it is away, and when another host goes on."""

from __future__ import annotations

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import egeria
from egeria.cli import main
from egeria.errors import JournalError
from egeria.events import Declined, IntervalMeasured, ModuleFrozen, Resumed, RunClosed
from egeria.journal import EgeriaWarning
from egeria.report import Summary

URL = "memory://bucket/run"


class Away(MemoryFileSystem):
    """A store that can be reached at some times only, and shows the login in what it raises."""

    protocol = "away"
    is_away = False

    def _check(self):
        if Away.is_away:
            raise ConnectionError("no route to away://me:hunter2@bucket")

    def put_file(self, *arguments, **options):
        self._check()
        super().put_file(*arguments, **options)

    def cat_file(self, *arguments, **options):
        self._check()
        return super().cat_file(*arguments, **options)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where runs are kept on this host
    monkeypatch.setattr(Away, "is_away", False)
    fsspec.register_implementation("away", Away, clobber=True)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class Training:
    """A small loop that freezes by a plan, and can be saved and gone on with."""

    def __init__(self, url=URL, steps=60):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        settings = {"plasticity": {"interval_steps": 2}}
        self.run = egeria.attach(
            self.model, self.optimizer, total_steps=steps, plan="0.5:2", config=settings, directory=url
        )

    def go(self, count):
        for _ in range(count):
            loss = self.model(torch.randn(4, 8)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.run.step(loss)
        return self

    def local(self):
        return (self.run.directory / "journal.jsonl").read_bytes()


def stored(name="journal.jsonl", url=URL):
    with fsspec.open(f"{url}/{name}") as file:
        return file.read()


def another_host(tmp_path, monkeypatch):
    monkeypatch.setattr("egeria.journal.reader.RUNS", tmp_path / "another host")


def test_the_store_has_the_journal_at_each_state_and_at_the_end_and_the_report_reads_it_there(capsys):
    training = Training().go(30)
    assert not MemoryFileSystem.store
    training.run.state_dict()
    assert stored() == training.local()
    training.go(30).run.close()
    assert stored() == training.local()
    journal = egeria.read_journal(URL)
    assert [event.module for event in journal.of(ModuleFrozen)] == [0, 1] and journal.of(RunClosed)
    found = egeria.report(URL)
    assert f"{URL}/report.html" in found.message
    assert stored("report.html") == found.path.read_bytes()
    assert main(["report", URL]) == 0 and f"{URL}/report.html" in capsys.readouterr().out.replace("\n", "")


def test_a_store_that_goes_away_costs_one_warning_and_no_step():
    training = Training("away://me:hunter2@bucket/run").go(30)
    Away.is_away = True
    with pytest.warns(EgeriaWarning, match="copy the journal to away://bucket/run: ConnectionError") as told:
        training.run.state_dict()
        training.run.state_dict()
        training.go(30).run.close()
    assert len([entry for entry in told if "copy the journal" in str(entry.message)]) == 1
    journal = egeria.read_journal(training.run.directory)
    assert len(journal.of(Declined)) == 1 and journal.of(ModuleFrozen) and journal.of(RunClosed)
    assert b"hunter2" not in training.local()
    with pytest.raises(JournalError, match="no route"):
        egeria.read_journal("away://bucket/run")


def test_what_the_store_has_is_not_replaced_where_it_could_not_be_read():
    first = Training("away://bucket/run").go(10)
    first.run.close()
    kept = stored(url="away://bucket/run")
    (first.run.directory / "journal.jsonl").unlink()  # as on another host
    Away.is_away = True
    with pytest.warns(EgeriaWarning, match="copy the journal"):
        second = Training("away://bucket/run")
    Away.is_away = False
    second.go(10).run.close()
    assert stored(url="away://bucket/run") == kept and egeria.read_journal(second.run.directory).of(RunClosed)


def test_another_host_goes_on_behind_what_the_store_has(tmp_path, monkeypatch):
    first = Training().go(30)
    state = first.run.state_dict()
    first.go(10)  # and its host dies
    another_host(tmp_path, monkeypatch)
    second = Training()
    second.run.load_state_dict(state)
    second.go(30).run.close()
    journal = egeria.read_journal(URL)
    assert len(journal.of(Resumed)) == 1 and journal.num_damaged == 0
    assert [event.step for event in journal.of(IntervalMeasured)] == list(range(2, 61, 2))
    summary = Summary.from_events(journal)
    assert (summary.num_resumed, summary.first_step) == (1, 0)
