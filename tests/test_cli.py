"""The command line: what each verb prints, and its exit status when something is wrong."""

from __future__ import annotations

import json
import runpy
import sys
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import egeria
from egeria import attach, events
from egeria.cli import digits, doctor, main
from egeria.layers.modules import parse_modules
from egeria.layers.pretrained import count_pretrained, find_trained_norms
from egeria.testing import ScriptedController
from resnet import cifar_resnet

VERBS = ("demo", "advise", "modules", "report", "replay", "cache", "doctor")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    """Nothing printed is folded, and what the verbs add to the search path goes again."""
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def command(capsys):
    """Run `egeria` and return its exit status, output and errors."""

    def call(*arguments):
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def table(output):
    """The cells of a printed table, row by row."""
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def unfolded(output):
    """What is printed, without any blanks: the title of a narrow table is folded."""
    return "".join(output.split())


def train(directory, *, window=2, steps=40, names="0123"):
    """A tiny run whose readings never move: a module freezes as soon as the window allows."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {
        "policy": {"name": "egeria"},
        "plasticity": {"interval_steps": 1, "window": window},
        "bootstrapping": {"change_threshold": 1.0},
        "controller": {"budget_share": 1000.0},
    }
    with attach(model, optimizer, config=config, directory=directory, controller=ScriptedController()) as run:
        for _ in range(steps):
            loss = run.model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
            run.log(accuracy=0.5)
    return egeria.read_journal(directory)


@pytest.fixture
def run(tmp_path):
    """The directory of a run that froze all it could."""
    journal = train(tmp_path / "run")
    assert [event.module for event in journal.of(events.ModuleFrozen)] == [0, 1, 2]
    return tmp_path / "run"


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"egeria {egeria.__version__}\n"


def test_the_help_names_every_verb(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and all(verb in printed for verb in VERBS)


@pytest.mark.parametrize("arguments", [[], ["thaw"], ["report"], ["modules"], ["demo", "--seeds", "three"]])
def test_a_command_that_is_not_understood_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    printed = capsys.readouterr()
    assert end.value.code == 2 and printed.out == "" and "usage: egeria" in printed.err


def test_the_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["egeria", "report", "nowhere"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("egeria.cli", run_name="__main__")
    assert end.value.code == 2 and "egeria report:" in capsys.readouterr().err


@pytest.mark.parametrize("made", ["training", "training_by_name"])
def test_advise_measures_a_training_and_tells_what_a_schedule_would_save(made, command, tmp_path):
    out = tmp_path / "advice.json"
    status, output, errors = command("advise", f"cli_models:{made}", "--schedule", "0.5:1", "--json", str(out))
    assert status == 0 and not errors
    assert "stem" in output and "orth" in output and "'0.5:1' would save" in output
    assert len(json.loads(out.read_text(encoding="utf8"))["costs"]) == 2


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("cli_models:named", "found Named"),
        ("cli_models:training_without_optimizer", "found ['data', 'model']"),
        ("cli_models", "package.module:callable"),
        ("cli_models:nothing_here", "AttributeError"),
    ],
)
def test_advise_refuses_what_is_no_training_with_status_2(path, said, command):
    status, output, errors = command("advise", path)
    assert status == 2 and not output
    assert errors.startswith("egeria advise: ") and said in errors


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--schedule", "half:2"), "schedule must be"), (("--json", "no/such/folder/a.json"), "a folder that exists")],
)
def test_advise_refuses_wrong_options_before_it_measures(options, said, command):
    status, output, errors = command("advise", "cli_models:nothing_here", *options)
    assert status == 2 and not output
    assert errors.startswith("egeria advise: ") and said in errors


def test_modules_prints_the_cut_with_parameters_and_reasons(command):
    status, output, errors = command("modules", "cli_models:resnet_with_example")
    assert status == 0 and errors == ""
    total = sum(parameter.numel() for parameter in cifar_resnet(20).parameters())
    assert f"CifarResNet: {total:,} parameters in" in output
    assert "In execution order." in output
    rows = table(output)[1:] if table(output)[0][0] == "layer module" else table(output)
    assert sum(int(row[1].replace(",", "")) for row in rows) == total
    assert sum(float(row[2].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.5)
    assert "conv1" in rows[0][3] and rows[-1][4].endswith("Never frozen.")
    assert not any("Never frozen" in row[4] for row in rows[:-1])


def test_modules_without_an_example_says_that_it_took_the_definition(command):
    status, output, _ = command("modules", "cli_models:named")
    assert status == 0 and "In definition order" in output
    assert [row[0] for row in table(output)][-2:] == ["head", "stem"]


def test_modules_with_an_example_follows_the_execution(command):
    status, output, _ = command("modules", "cli_models:named_with_example")
    assert status == 0 and "In execution order." in output
    assert [row[0] for row in table(output)][-2:] == ["stem", "head"]


def test_modules_takes_a_single_tensor_as_example(command):
    status, output, _ = command("modules", "cli_models:sequence_with_tensor")
    assert status == 0 and "In execution order." in output


def test_modules_prints_a_pattern_as_it_was_given(command):
    status, output, _ = command("modules", "cli_models:named", "--pattern", "[a-z]+|[/]")
    assert status == 0 and "'[a-z]+|[/]'" in output


def test_modules_finds_what_lies_in_the_working_directory(command, tmp_path):
    (tmp_path / "lies_here.py").write_text("from cli_models import named as build\n", encoding="utf-8")
    assert command("modules", "lies_here:build")[0] == 0


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("cli_models", "named as package.module:callable, found 'cli_models'"),
        ("cli_models:", "named as package.module:callable"),
        (":resnet", "named as package.module:callable"),
        ("no_such_module:resnet", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("cli_models:no_such_name", "no_such_name"),
        ("cli_models:not_callable", "TypeError"),
        ("cli_models:needs_an_argument", "'depth'. Write a small function that builds it"),
        ("cli_models:fails", "RuntimeError: out of [bold]luck[/]"),
        ("cli_models:no_model", "must return a torch.nn.Module, or a tuple of it and example arguments, found dict"),
        ("cli_models:three_things", "found tuple"),
        ("cli_models:one_thing", "found tuple"),
        ("cli_models:wrong_example", "must take its example arguments; RuntimeError"),
        ("cli_models:single_layer", "at least two layers or blocks"),
        ("cli_models:no_parameters", "must have parameters, found none"),
    ],
)
def test_modules_refuses_what_is_no_model_with_status_2(path, said, command):
    status, output, errors = command("modules", path)
    assert (status, output) == (2, "")
    assert errors.startswith("egeria modules: ") and said in errors


@pytest.mark.parametrize("pattern", ["(", "no_such_layer"])
def test_modules_refuses_a_pattern_that_cuts_nothing(pattern, command):
    status, output, errors = command("modules", "cli_models:named", "--pattern", pattern)
    assert (status, output) == (2, "") and f"'{pattern}'" in errors


def test_report_prints_the_summary_and_writes_the_page(run, command):
    status, output, errors = command("report", run)
    assert status == 0 and errors == ""
    assert "40 steps, knowledge-guided" in output and "3 of 4 modules" in output and "accuracy" in output
    assert "report.html" in output
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!")


@pytest.mark.parametrize("verb", ["report", "replay"])
def test_a_directory_without_a_journal_ends_with_status_2(verb, command, tmp_path):
    status, output, errors = command(verb, tmp_path / "nowhere[/x]")
    assert (status, output) == (2, "")
    assert errors.startswith(f"egeria {verb}: ") and "nowhere[/x]" in errors and "cannot be read" in errors


@pytest.mark.parametrize("verb", ["report", "replay"])
def test_a_journal_of_a_newer_egeria_ends_with_status_2(verb, command, tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"event":"journal_opened","schema_version":99}\n', encoding="utf-8")
    status, _, errors = command(verb, tmp_path)
    assert status == 2 and "schema 99" in errors


def test_replay_agrees_with_the_run(run, command):
    status, output, errors = command("replay", run)
    assert status == 0 and errors == ""
    assert "The replay agrees." in output and "withitsownsettings" in unfolded(output)
    rows = table(output)
    assert len(rows) == 4 and all(decided == replayed for _, decided, replayed in rows)
    assert [decided for _, decided, _ in rows] == ["knowledge-guided", "freeze 0", "freeze 1", "freeze 2"]


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path, command):
    train(tmp_path / "[bold]", names=("[red]", "[/]", "[link=x]", "head"))
    status, output, _ = command("replay", tmp_path / "[bold]")
    assert status == 0
    assert [decided for _, decided, _ in table(output)][1:] == ["freeze [red]", "freeze [/]", "freeze [link=x]"]
    status, output, _ = command("report", tmp_path / "[bold]")
    assert status == 0 and "[bold]" in output


def test_replay_of_a_run_that_decided_otherwise_ends_with_status_1(run, command):
    path = run / "journal.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not (json.loads(line)["event"] == "frozen" and json.loads(line)["module"] == 2)]
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    status, output, _ = command("replay", run)
    assert status == 1 and "The replay disagrees." in output
    assert table(output)[-1][1:] == ["", "freeze 2"]


def test_replay_decides_nothing_after_the_run_stopped_freezing(tmp_path, command):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"policy": {"plan": "0.2:1 0.6:2"}, "plasticity": {"interval_steps": 2}}
    run = attach(model, optimizer, config=config, policy="static", total_steps=20, directory=tmp_path / "run")
    for step in range(20):
        if step == 8:
            model.requires_grad_(True)
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", egeria.EgeriaWarning)
            run.step(torch.ones(()))
    run.close()
    status, output, _ = command("replay", tmp_path / "run")
    assert status == 0 and "The replay agrees." in output
    assert table(output) == [["4", *["freeze 0"] * 2], ["10", *["the end of freezing"] * 2]]
    settings = tmp_path / "settings.toml"
    settings.write_text("policy.name = 'static'\npolicy.schedule = '0.6:2'\n", encoding="utf-8")
    _, output, _ = command("replay", tmp_path / "run", "--config", settings)
    assert table(output)[1:] == [["10", "the end of freezing", ""], ["12", "", "freeze 0, freeze 1"]]


def test_replay_with_other_settings_says_where_the_readings_run_out(run, command, tmp_path):
    settings = tmp_path / "slower[red].toml"
    settings.write_text(
        "policy.name = 'egeria'\n[plasticity]\nwindow = 5\n[bootstrapping]\nchange_threshold = 1.0\n", encoding="utf-8"
    )
    froze = egeria.read_journal(run).of(events.ModuleFrozen)[0].step
    status, output, _ = command("replay", run, "--config", settings)
    assert status == 0, "another outcome is what one asks for"
    assert f"with{settings}" in unfolded(output)
    assert f"From step {froze + 1} these settings wait for readings that the run did not take" in output
    assert "readings were of a module these settings were not waiting for" in output
    assert "agrees" not in output and "disagrees" not in output
    assert [replayed for _, _, replayed in table(output)] == ["knowledge-guided", "", "", ""]


def test_replay_with_quicker_settings_decides_earlier_on_what_it_has(tmp_path, command):
    journal = train(tmp_path / "run", window=6)
    froze = journal.of(events.ModuleFrozen)[0].step
    settings = tmp_path / "quicker.toml"
    settings.write_text(
        "policy.name = 'egeria'\n[plasticity]\nwindow = 2\n[bootstrapping]\nchange_threshold = 1.0\n", encoding="utf-8"
    )
    status, output, _ = command("replay", tmp_path / "run", "--config", settings)
    steps = {replayed: int(step) for step, _, replayed in table(output)}
    assert status == 0 and steps["freeze 0"] < froze
    assert "these settings wait for readings" not in output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "readable TOML file"),
        ("[plasticity\n", "must be TOML"),
        ("[plasticity]\nwindw = 3\n", "[plasticity] knows"),
        ("[plasticity]\nwindow = 1\n", "plasticity.window must be a whole number of at least 2, found 1"),
        ("[unfreezing]\nrule = 'cosin'\n", "'cosin'"),
    ],
)
def test_replay_refuses_settings_it_cannot_read_with_status_2(text, said, run, command, tmp_path):
    settings = tmp_path / "settings.toml"
    if text is not None:
        settings.write_text(text, encoding="utf-8")
    status, output, errors = command("replay", run, "--config", settings)
    assert (status, output) == (2, "") and errors.startswith("egeria replay: ") and said in errors


def test_replay_of_half_a_journal_ends_with_status_2(command, tmp_path):
    line = {"event": "journal_opened", "schema_version": 1}
    (tmp_path / "journal.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    status, _, errors = command("replay", tmp_path)
    assert status == 2 and "run_started" in errors


def test_replay_of_a_plain_run_ends_with_status_2(command, tmp_path):
    opened = {"event": "journal_opened", "schema_version": events.SCHEMA_VERSION}
    plain = {"interval_reason": "plain training", "rule": "none", "total_steps": 4, "interval_steps": 0}
    nothing = {"config": {}, "modules": [], "trainable": [], "deepest_freeze": 0, "environment": {}}
    lines = (opened, {"event": "run_started", "step": 0, **plain, **nothing})
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    status, output, errors = command("replay", tmp_path)
    assert (status, output) == (2, "") and errors.startswith("egeria replay: ")
    assert "plain training" in errors and str(tmp_path) in errors and "egeria.attach" in errors


def test_replay_of_a_run_that_could_not_freeze_has_nothing_to_say(command, tmp_path):
    model = nn.Linear(2, 2)
    with pytest.warns(egeria.EgeriaWarning, match="two layers"):
        egeria.attach(model, torch.optim.SGD(model.parameters()), directory=tmp_path / "run").close()
    status, output, _ = command("replay", tmp_path / "run")
    assert status == 0 and table(output) == [] and "The replay agrees." in output


def test_doctor_measures_the_directory(command, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_BYTES", 2**21)
    (tmp_path / "disk[x]").mkdir()
    status, output, errors = command("doctor", "--directory", tmp_path / "disk[x]")
    assert status == 0 and errors == ""
    for fact in ("torch.compile", "quantization engines", "threads of torch", "memory", "accelerator", "MiB/s"):
        assert fact in output
    assert torch.__version__ in output and "disk[x]" in output
    assert list((tmp_path / "disk[x]").iterdir()) == [], "the probe is gone"


@pytest.mark.parametrize("kind", ["missing", "below a file"])
def test_doctor_ends_with_status_1_where_it_cannot_write(kind, command, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    directory = tmp_path / ("missing" if kind == "missing" else "file/below")
    status, output, _ = command("doctor", "--directory", directory)
    assert status == 1 and "cannot be written" in output
    assert "torch" in output, "the rest is shown all the same"


@pytest.fixture
def few_digits(monkeypatch):
    """Made-up digits in place of scikit-learn's: the demo runs in seconds."""
    generator = torch.Generator().manual_seed(0)

    def some(count):
        images = torch.randn(count, 1, 16, 16, generator=generator)
        return TensorDataset(images, torch.randint(0, 5, (count,), generator=generator))

    given = [digits.Digits(train=some(128), test=some(32)) for _ in range(2)]
    monkeypatch.setattr(digits, "load_digits", lambda: tuple(given))
    monkeypatch.setattr(digits.pretrain, "__kwdefaults__", {"epochs": 1})


def test_the_demo_compares_plain_training_with_egeria(few_digits, command, tmp_path):
    stale = tmp_path / "out" / "seed0" / "journal.jsonl"
    stale.parent.mkdir(parents=True)
    stale.write_text("of an earlier demo\n", encoding="utf-8")
    status, output, _ = command("demo", "--seeds", 1, "--epochs", 4, "--directory", tmp_path / "out")
    assert status == 0
    rows = {row[0]: row[1:] for row in table(output)}
    assert {"plain", "egeria"} <= set(rows)
    assert rows["plain"][3:] == ["", ""] and all("±" in cell for cell in rows["egeria"])
    assert "What froze, by epoch:" in output and "seed 0: " in output
    assert str(tmp_path / "out" / "seed0" / "report.html") in output
    journal = egeria.read_journal(tmp_path / "out" / "seed0")
    assert journal.num_damaged == 0
    assert [event.step for event in journal.of(events.MetricLogged)] == [2, 4, 6, 8]
    assert (tmp_path / "out" / "seed0" / "report.html").is_file()


@pytest.mark.parametrize("arguments", [("--seeds", 0), ("--epochs", 3), ("--epochs", 0)])
def test_a_demo_that_shows_nothing_is_refused(arguments, command):
    status, output, errors = command("demo", *arguments)
    assert (status, output) == (2, "") and "at least 1 seed and 4 epochs" in errors


def test_the_demo_without_scikit_learn_says_what_to_install(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    status, _, errors = command("demo", "--seeds", 1)
    assert status == 2 and "pip install 'egeria[demo]'" in errors


def test_the_digits_are_split_the_same_way_each_time():
    pytest.importorskip("sklearn")
    first, again = digits.load_digits(), digits.load_digits()
    assert [(len(half.train), len(half.test)) for half in first] == [(676, 225), (672, 224)]
    for half, other in zip(first, again, strict=True):
        images, labels = half.train.tensors
        assert images.shape[1:] == (1, 16, 16)
        assert set(labels.tolist()) == set(range(5))
        assert all(torch.equal(a, b) for a, b in zip(half.train.tensors, other.train.tensors, strict=True))


def test_the_network_of_the_demo_counts_as_trained_once_it_is_and_its_front_can_freeze():
    images, labels = torch.randn(128, 1, 16, 16), torch.randint(0, 5, (128,))
    data = TensorDataset(images, labels)
    model = digits.pretrain(digits.Digits(train=data, test=data), seed=0, epochs=1)
    modules = parse_modules(model, target_share=0.1)
    assert count_pretrained(find_trained_norms(model), modules) >= len(modules) - 1 >= 4
