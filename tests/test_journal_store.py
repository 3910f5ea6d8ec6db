"""A run whose directory is a URL: what the store has, when it is away, and when another host goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import egeria
from egeria.cli import main
from egeria.errors import JournalError
from egeria.events import Declined, IntervalChanged, IntervalMeasured, JournalCopied, ModuleFrozen, Resumed, RunClosed
from egeria.journal import EgeriaWarning, store
from egeria.report.history import read_history


class Store(MemoryFileSystem):
    """An object store that can be away."""

    protocol = "away"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    is_away = False

    def pipe_file(self, path, value, **options):
        if Store.is_away:
            raise ConnectionError("no route to the store")
        super().pipe_file(path, value, **options)

    def cat_file(self, path, start=None, end=None, **options):
        if Store.is_away:
            raise ConnectionError("no route to the store")
        return super().cat_file(path, start=start, end=end, **options)

    def exists(self, path, **options):
        """Take every failure for no, as fsspec's own does."""
        return not Store.is_away and super().exists(path, **options)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where runs are kept on this host
    monkeypatch.setattr(store, "EVERY_S", 0.02)
    monkeypatch.setattr(store, "RETRY_S", 0.02)
    monkeypatch.setattr(store, "LAST_S", 2.0)
    monkeypatch.setattr(store.JournalCopy.__init__, "__defaults__", (0.02,))
    monkeypatch.setattr(Store, "is_away", False)
    fsspec.register_implementation("away", Store, clobber=True)
    Store.store.clear()


class Training:
    """A small loop that freezes by a schedule, and can be saved and gone on with."""

    def __init__(self, url, steps=60):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        settings = {"policy": {"plan": "0.5:2"}, "plasticity": {"interval_steps": 2}}
        self.run = egeria.attach(
            self.model, self.optimizer, total_steps=steps, config=settings, directory=url, controller="inline"
        )

    def go(self, count):
        for _ in range(count):
            loss = self.model(torch.randn(4, 8)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.run.step(loss)
        return self


def until(condition, longest_s=10.0):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < longest_s, "never"
        time.sleep(0.02)


def test_the_store_has_what_the_local_journal_has_and_the_report_reads_it_there(capsys):
    training = Training("away://bucket/run").go(40)
    until(lambda: store.read_bytes("away://bucket/run/journal.jsonl"))
    training.go(20).run.close()
    local = (training.run.directory / "journal.jsonl").read_bytes()
    assert store.read_bytes("away://bucket/run/journal.jsonl") == local
    journal = egeria.read_journal("away://bucket/run")
    assert [event.module for event in journal.of(ModuleFrozen)] == [0, 1] and journal.of(RunClosed)
    found = egeria.report("away://bucket/run")
    assert found.path.is_file() and "away://bucket/run/report.html" in found.message
    assert store.read_bytes("away://bucket/run/report.html") == found.path.read_bytes()
    assert main(["report", "away://bucket/run"]) == 0 and main(["replay", "away://bucket/run"]) == 0
    assert "away://bucket/run/report.html" in capsys.readouterr().out.replace("\n", "")


def test_a_store_that_goes_away_and_comes_back_has_all_of_it_and_the_journal_says_so():
    training = Training("away://bucket/run").go(10)
    until(lambda: store.read_bytes("away://bucket/run/journal.jsonl"))
    Store.is_away = True
    with pytest.warns(EgeriaWarning, match="copy the journal to away://bucket/run") as told:
        until(lambda: training.go(2) and training.run._recorder._copy._failed_s is not None)
        training.go(4)
    assert len([entry for entry in told if "copy the journal" in str(entry.message)]) == 1
    Store.is_away = False
    until(lambda: training.run._recorder._copy._failed_s is None)
    training.go(4).run.close()
    journal = egeria.read_journal("away://bucket/run")
    (declined,), (back,) = journal.of(Declined), journal.of(JournalCopied)
    assert "no route to the store" in declined.reason and back.behind_s > 0
    assert journal.events == egeria.read_journal(training.run.directory).events


def test_a_store_that_never_comes_stops_nothing_and_the_journal_is_on_this_host():
    Store.is_away = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        training = Training("away://bucket/run").go(60)
        training.run.close()
    assert any("the end of the journal is in" in str(entry.message) for entry in told)
    assert egeria.read_journal(training.run.directory).of(RunClosed)
    with pytest.raises(JournalError, match="no route to the store"):
        egeria.read_journal("away://bucket/run")


def test_an_unknown_protocol_and_one_that_lacks_its_package_train_on():
    with pytest.warns(EgeriaWarning, match="nowhere://bucket/run"):
        training = Training("nowhere://bucket/run").go(60)
        training.run.close()
    assert training.run.frozen == 0 and egeria.read_journal(training.run.directory).of(ModuleFrozen)


def test_another_host_goes_on_behind_what_the_store_has(tmp_path, monkeypatch):
    first = Training("away://bucket/run").go(30)
    state = first.run.state_dict()
    first.run.close()
    monkeypatch.chdir(tmp_path.parent)  # no local journal here
    monkeypatch.setattr("egeria.journal.recorder.RUNS", tmp_path / "other")
    second = Training("away://bucket/run")
    second.run.load_state_dict(state)
    second.go(30).run.close()
    journal = egeria.read_journal("away://bucket/run")
    assert len(journal.of(Resumed)) == 1 and journal.num_damaged == 0
    assert [event.step for event in journal.of(IntervalMeasured)] == list(range(2, 61, 2))
    assert len(egeria.read_journal(second.run.directory).of(IntervalMeasured)) < 20
    history = read_history("away://bucket/run")
    assert history.num_processes == 2 and history.first_step == history.num_missing_steps == 0


def test_what_a_dead_host_never_copied_is_a_gap_that_the_report_tells(tmp_path, monkeypatch):
    first = Training("away://bucket/run").go(10)
    until(lambda: b'"step":10' in store.read_bytes("away://bucket/run/journal.jsonl"))
    kept = store.read_bytes("away://bucket/run/journal.jsonl")
    first.go(20)
    state = first.run.state_dict()
    first.run.close()
    store.write_bytes("away://bucket/run/journal.jsonl", kept)  # as if the host had died before the next copy
    monkeypatch.setattr("egeria.journal.recorder.RUNS", tmp_path / "other")
    second = Training("away://bucket/run")
    second.run.load_state_dict(state)
    second.go(30).run.close()
    assert read_history("away://bucket/run").num_missing_steps == 20
    assert "a gap of 20 steps" in str(egeria.report("away://bucket/run"))


def test_longer_intervals_are_no_gap(tmp_path):
    def measured(step, num_steps):
        return IntervalMeasured(
            step=step,
            evaluation=step,
            loss=1.0,
            num_steps=num_steps,
            num_bad_losses=0,
            learning_rate=0.1,
            frozen=0,
            iteration_wall_s=0.1,
            iteration_cpu_s=0.1,
            gradients=None,
            weight_changes=None,
            noise=None,
            way_ahead=None,
            last_rate=None,
        )

    started = Training(str(tmp_path / "run")).run
    for event in (measured(5, 5), IntervalChanged(step=5, before=5, after=50, reason="worth decides")):
        started._recorder.write(event)
    started.close()
    again = Training(str(tmp_path / "run")).run
    for step in (45, 80):
        again._recorder.write(Resumed(step=step, frozen=0, stage="knowledge-guided"))
    again.close()
    assert read_history(tmp_path / "run").num_missing_steps == 75, "80 steps are more than an interval, 45 are none"


def test_this_host_knows_more_than_the_store_where_that_was_away():
    first = Training("away://bucket/run").go(20)
    until(lambda: store.read_bytes("away://bucket/run/journal.jsonl"))
    Store.is_away = True
    state = first.run.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first.go(4).run.close()
    Store.is_away = False
    second = Training("away://bucket/run")
    second.run.load_state_dict(state)
    second.go(40).run.close()
    assert store.read_bytes("away://bucket/run/journal.jsonl") == (second.run.directory / "journal.jsonl").read_bytes()


def test_a_store_that_is_away_at_first_contact_keeps_what_other_hosts_wrote():
    store.write_bytes("away://bucket/run/journal.jsonl", b'{"of": "another host"}\n')
    Store.is_away = True
    with pytest.warns(EgeriaWarning, match="copy the journal"):
        training = Training("away://bucket/run")
        until(lambda: training.go(2) and training.run._recorder._copy._failed_s is not None)
        training.go(2)
    Store.is_away = False
    training.run.close()
    assert store.read_bytes("away://bucket/run/journal.jsonl").startswith(b'{"of": "another host"}\n')


def test_what_trying_again_cannot_mend_does_not_hold_up_the_end_and_no_password_is_told():
    fsspec.register_implementation("denied", type("Denied", (Store,), {"pipe_file": deny}), clobber=True)
    with pytest.warns(EgeriaWarning, match="denied://bucket/run") as told:
        training = Training("denied://me:hunter2@bucket/run").go(20)
        began = time.monotonic()
        training.run.close()
    assert time.monotonic() - began < 1.0, "LAST_S is 2"
    assert not any("hunter2" in str(entry.message) for entry in told)
    assert "hunter2" not in (training.run.directory / "journal.jsonl").read_text()


def deny(self, path, value, **options):
    raise PermissionError(f"denied://me:hunter2@{path}")


@pytest.mark.parametrize(
    ("stored", "earlier", "front"),
    [
        (b"", b"", (b"", 0)),
        (b"a\n", b"a\nb\n", (b"", 0)),  # all of it is here
        (b"a\nb\n", b"a\n", (b"a\nb\n", 2)),  # another host went on
        (b"a\nb\n", b"", (b"a\nb\n", 0)),
        (b"a\nb", b"", (b"a\nb\n", 0)),  # torn
        (b"x\n", b"a\n", (b"x\na\n", 2)),  # of another run: neither is lost
        (b"a\nb\nc\n", b"b\n", (b"a\nb\nc\n", 2)),  # this host was the second of three
        (b"a\nb\nc\n", b"a\nc\nd\n", (b"a\nb\nc\nd\n", 6)),  # and knows what the store missed
    ],
)
def test_what_stands_in_front_of_a_copy(stored, earlier, front):
    assert store._front(stored, earlier) == front


# A server


def serve(port):
    log = subprocess.DEVNULL
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log)

    def answers():
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api", timeout=1).status == 200
        except OSError:
            return False

    until(answers, longest_s=60)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
    return server


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_object_store_that_is_restarted_in_mid_run(monkeypatch):
    pytest.importorskip("moto", reason="the object store of this test")
    pytest.importorskip("s3fs", reason="what fsspec needs for s3")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": f"http://127.0.0.1:{port}"})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setitem(os.environ, name, "of-no-use")
    monkeypatch.setattr(store, "LAST_S", 60.0)
    server = serve(port)
    try:
        training = Training("s3://bucket/digits", steps=2000).go(100)
        until(lambda: store.read_bytes("s3://bucket/digits/journal.jsonl"), longest_s=60)
        server.send_signal(signal.SIGKILL)
        server.wait()
        with pytest.warns(EgeriaWarning, match="copy the journal"):
            until(lambda: training.go(2) and training.run._recorder._copy._failed_s is not None, longest_s=100)
            training.go(2)
        server = serve(port)  # it has forgotten all
        until(lambda: training.run._recorder._copy._failed_s is None, longest_s=100)
        training.go(20).run.close()
        journal = egeria.read_journal("s3://bucket/digits")
        assert journal.of(JournalCopied)[0].behind_s > 0 and journal.of(Declined)
        assert journal.events == egeria.read_journal(training.run.directory).events
        assert egeria.report("s3://bucket/digits").summary.history.num_missing_steps == 0
    finally:
        server.kill()
        server.wait()
