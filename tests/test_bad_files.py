"""Files and folders that are damaged, not ours, or in the way: none is lost, and none breaks a training."""

import os
import time
import tracemalloc
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import egeria
from egeria import ConfigError, JournalError, cli, events, read_journal
from egeria.config import Config
from egeria.errors import EgeriaError, StateError
from egeria.journal import FILE_NAME, Recorder
from egeria.report import Summary
from test_journal import EXAMPLES, FROZEN, OPENED, READ, logged, warned, write, write_lines

STARTED = next(event for event in EXAMPLES if isinstance(event, events.RunStarted))
MODULE = STARTED.modules[0]


def attached(directory, **options):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"plan": "0.5:1", "total_steps": 10, "config": {"cache": {"enabled": False}}, **options}
    run = egeria.attach(model, optimizer, directory=directory, **options)

    def train(count):
        for _ in range(count):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            run.step(1.0)

    return run, train


def nested(depth):
    return [nested(depth - 1)] if depth else 0


FOREIGN = ["no json", "\x00\x00\x00", "[" * 100_000, "1" * 5000, "3", "[]", "null", {"step": 3}, {"event": "frozen"}]
FOREIGN += [{"event": kind, "step": 3} for kind in ("of another program", [], None)]
MISFITS = [(READ, "step", value) for value in (2**53, -(10**400), 1.5, True, "1", None, [])]
MISFITS += [(READ, "name", value) for value in (5, None, "x" * 2**22, ["x"])]
MISFITS += [(READ, "value", value) for value in ("0.5", None, 10**400, {})]
MISFITS += [(logged(a=1.0), "values", value) for value in ({"a": "x"}, {"a": None}, [], {"a": nested(1)}, 3)]
MISFITS += [(STARTED, "config", value) for value in ([], {"policy": 5}, {"policy": nested(50)}, {"a": {"b": 10**99}})]
MISFITS += [(STARTED, "environment", value) for value in ([], {"a": nested(500)}, {"a": [0] * 100_001})]
MISFITS += [(STARTED, "modules", value) for value in ({}, [5], [{}], [{**MODULE, "name": 5}])]
MISFITS += [(STARTED, "modules", [{**MODULE, key: "x"}]) for key in ("num_parameters", "num_trainable", "share")]
MISFITS += [(FROZEN, "run", value) for value in ([], {})]


@pytest.mark.parametrize("lines", [FOREIGN, [{**event.to_dict(), name: value} for event, name, value in MISFITS]])
def test_lines_that_do_not_fit_are_counted_and_left_out(lines, tmp_path):
    write_lines(tmp_path, OPENED, logged(a=1.0).to_dict(), "", *lines, "  ")
    journal = read_journal(tmp_path)
    assert ([event.kind for event in journal], journal.num_damaged) == (["metric"], len(lines))
    assert journal.first_damaged == 4
    told = f"{len(lines)} lines of the journal could not be read, the first is line 4."
    assert told in str(egeria.report(tmp_path))


# --- anything, generated; FUZZ=2000 makes more examples, each time others --------------------------

MANY = settings(max_examples=int(os.environ.get("FUZZ", "60")), deadline=None, derandomize="FUZZ" not in os.environ)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
JSON = st.recursive(PLAIN, lambda some: st.lists(some) | st.dictionaries(st.text(max_size=5), some), max_leaves=20)


def changed(data, draw):
    """Return bytes with a part replaced, left out or repeated."""
    begin = draw(st.integers(0, len(data)))
    end = draw(st.integers(begin, min(len(data), begin + 200)))
    return data[:begin] + draw(st.binary(max_size=20) | st.just(data[begin:end] * 2)) + data[end:]


@MANY
@given(data=st.data())
def test_any_journal_can_be_read_or_is_refused(data, tmp_path_factory):
    folder, records = tmp_path_factory.mktemp("run"), [OPENED]
    for event in data.draw(st.lists(st.sampled_from([*EXAMPLES, logged(a=1.0)]), min_size=1, max_size=8)):
        records.append(event.to_dict())
        if data.draw(st.booleans()):
            records[-1][data.draw(st.sampled_from(list(records[-1])))] = data.draw(JSON)
    write_lines(folder, *records)
    if data.draw(st.booleans()):
        whole = (folder / FILE_NAME).read_bytes()
        (folder / FILE_NAME).write_bytes(changed(whole, data.draw))
    try:
        journal = read_journal(folder)
        summary = Summary.from_events(journal, folder)
        assert len(journal) + journal.num_damaged and summary.step >= 0
        if not data.draw(st.integers(0, 15)):  # drawing takes time
            assert str(egeria.report(folder))
    except JournalError as error:
        assert "cannot be read" in str(error) or "schema" in str(error)
    run, train = attached(folder)
    train(1)
    run.close()


@MANY
@given(data=st.data())
def test_any_state_is_the_whole_one_or_is_refused(data, tmp_path_factory):
    run, train = attached(tmp_path_factory.mktemp("run"))
    train(6)
    state = changed(run.packed.state_dict()["state"], data.draw)
    before = run.state_dict()
    try:
        run.packed.load_state_dict({"state": state})
    except StateError as error:
        assert "Take an earlier checkpoint" in str(error) or "schema" in str(error)
    assert run.state_dict() == before and run.frozen == 1
    run.close()


def in_place(kind, path):
    """Put something into the place of a file; return what it holds, None if it is no file."""
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "link":
            path.symlink_to(path.with_name("elsewhere"))
            path.with_name("elsewhere").write_bytes(b"mine")
        case "other file":
            path.write_bytes(b"mine")
    return path.read_bytes() if kind in ("link", "other file") else None


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "link", "other file"])
def test_what_is_in_the_way_of_the_journal_stays_and_the_training_goes_on(kind, tmp_path):
    held = in_place(kind, tmp_path / FILE_NAME)
    with warned() as messages:
        run, train = attached(tmp_path)
        train(6)
        run.close()
    (said,) = messages
    assert f"journal in {tmp_path} cannot be written" in said and "Training continues. Give `attach` a writable" in said
    assert run.summary().frozen == 1
    assert held is None or held == (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(JournalError, match=r"holds a journal\.jsonl; .* cannot be read: .*Give the directory"):
        egeria.report(tmp_path)
    assert not (tmp_path / "report.html").exists()


NO_FILES = (None, 5, "a\0b", "x" * 5000, "/dev/zero", "~no one here/run")
WRONG = [(read, given, "cannot be read") for read in (egeria.report, read_journal) for given in NO_FILES]
WRONG += [(Config.load, given, "must be a TOML file") for given in NO_FILES]
NO_TOML = (5, None, "a = " + "[" * 5000, "[plasticity\n", "a = 1\na = 2")
WRONG += [(Config.from_toml, given, r"must be TOML; .*Correct that line") for given in NO_TOML]
WRONG += [(Config.from_dict, given, "must be nested dictionaries, found") for given in (5, None, [("cache", {})])]


@pytest.mark.parametrize(("read", "given", "said"), WRONG)
def test_what_cannot_be_read_is_refused(read, given, said):
    with pytest.raises((ConfigError, JournalError), match=said):
        read(given)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "link", "other file"])
@pytest.mark.parametrize("place", ["report.html", "advice.json"])
def test_a_file_that_egeria_did_not_write_is_not_overwritten(kind, place, tmp_path, capsys):
    write(tmp_path, FROZEN)
    held, before = in_place(kind, tmp_path / place), sorted(tmp_path.iterdir())
    is_page = place == "report.html"
    verb = ["report", tmp_path] if is_page else ["advise", "cli_models:fails", "--json", tmp_path / place]
    status = cli.main([str(argument) for argument in verb])
    assert status == (1 if is_page else 2)
    assert f"{place} cannot be written" in "".join(capsys.readouterr())
    assert sorted(tmp_path.iterdir()) == before and (held is None or held == (tmp_path / place).read_bytes())


@pytest.mark.parametrize("share", [1e308, -1.0, "0.5"])
def test_a_run_that_has_not_stepped_yet_has_a_report(share, tmp_path):
    started = {**STARTED.to_dict(), "modules": [{**MODULE, "share": share}] * 3}
    write_lines(tmp_path, OPENED, started)
    assert "resumed" not in str(egeria.report(tmp_path)) and egeria.report(tmp_path).summary.num_resumed == 0


@pytest.mark.parametrize("title", ["<title>run: egeria report</title>", None])
def test_a_page_of_egeria_is_replaced_whole_or_not_at_all(title, tmp_path, monkeypatch):
    write(tmp_path, FROZEN)
    page = tmp_path / "report.html"
    if title is not None:  # as of an earlier version
        page.write_text(title, encoding="utf-8")
    assert egeria.report(tmp_path).path == egeria.report(tmp_path).path == page
    whole = page.read_bytes()

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    assert "No space left" in egeria.report(tmp_path).message and page.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE_NAME, "report.html"]


RAISED = [(OSError(5, "broken"), 1), (RecursionError("deep\x1b[31m"), 1), (KeyboardInterrupt(), 130)]
RAISED += [(ConfigError("wrong[/x]"), 2), (MemoryError("[/x]"), 1), (SystemExit(0), 1), (GeneratorExit(), 1)]


@pytest.mark.parametrize(("error", "status"), RAISED)
def test_a_command_ends_with_one_line_and_a_status(error, status, monkeypatch, capsys):
    def fails(directory):
        raise error

    monkeypatch.setattr(egeria, "report", fails)
    assert cli.main(["report", "run"]) == status
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("egeria report: ")
    assert printed.err.count("\n") == 1 and "\x1b" not in printed.err
    assert ("[/x]" in printed.err) == ("[/x]" in str(error))


SECRETS = ["s3://key:hush@bucket/x", "https://hush@host", "https://h/?token=hush&a=1", "https://h/?a=1&X-Sig=hush"]
SECRETS += ["s3://key:hu/hush@bucket", "PASSWORD=hush", "api_key=hush"]


@pytest.mark.parametrize("text", SECRETS)
def test_passwords_and_tokens_of_urls_stand_nowhere(text, tmp_path):
    with warned() as messages:
        recorder = Recorder(tmp_path)
        recorder.decline("copying", f"{text} is gone")
        recorder.fault("copying", OSError(f"no {text!r}\x1b[31m"))
        recorder.close()
    said = [*messages, str(EgeriaError(text)), str(egeria.report(tmp_path))]
    said += [(tmp_path / name).read_text(encoding="utf-8") for name in (FILE_NAME, "report.html")]
    assert len(messages) == 2 and not any("hush" in each or "\x1b" in each for each in said)
    assert all("***" in each for each in said)


@pytest.mark.parametrize("given", ["~/run", "run", "../here/run"])
def test_a_directory_is_where_it_was_at_attach(given, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    monkeypatch.chdir(tmp_path / "here")
    run, train = attached(given, config={"cache": {"enabled": True, "directory": given + "-cache"}})
    monkeypatch.chdir(tmp_path)
    train(6)
    run.close()
    assert run.directory.is_absolute() and run.directory.samefile(tmp_path / "here" / "run")
    assert len(read_journal(run.directory)) and not (tmp_path / "here" / "~").exists()


@pytest.mark.parametrize("given", ["s3://bucket/run", Path("s3://u:hush@h/x"), 7, b"x", "~no one here/run", "a\0"])
def test_a_directory_is_a_folder_of_this_host(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="folder of this host, found") as caught:
        attached(given)
    assert "hush" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"cache\.directory must be a local folder, found"):
        egeria.Config.from_dict({"cache": {"directory": str(given) if isinstance(given, Path) else given}})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("order", ["one after the other", "attached together", "a step before"])
def test_two_runs_in_a_directory_are_both_readable_and_the_second_is_told(order, tmp_path):
    with warned() as messages:
        first, train_first = attached(tmp_path)
        train_first({"one after the other": 6, "attached together": 0, "a step before": 1}[order])
        if order == "one after the other":
            first.close()
        second, train_second = attached(tmp_path)
        for train in (train_second, train_first) * 3:
            train(1)
        second.close()
        first.close()
    (told,) = messages
    assert "holds the journal of another run" in told and "load_state_dict" in told
    assert len(read_journal(tmp_path).of(events.RunStarted)) == 2 and read_journal(tmp_path).num_damaged == 0
    made = egeria.report(tmp_path)
    assert (made.summary.step, made.summary.num_other_runs) == (3, 1) and "1 other run" in str(made)


def test_attaching_beside_a_long_journal_reads_its_ends_alone(tmp_path):
    write(tmp_path, logged(a=1.0))
    begin, line = (tmp_path / FILE_NAME).read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / FILE_NAME).write_text(begin + line * 400_000, encoding="utf-8")
    attached(tmp_path / "new")[0].close()
    tracemalloc.start()
    begin_s = time.process_time()
    run, _ = attached(tmp_path)
    took_s, (_, peak_bytes) = time.process_time() - begin_s, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took_s < 0.2 and peak_bytes < 20e6
    run.close()
