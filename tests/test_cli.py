"""The command line: what each verb prints, and its exit status when something is wrong."""

import json
import sys

import pytest
import torch
from torch import nn

import egeria
from egeria import attach, events
from egeria.cli import main
from resnet import cifar_resnet
from scripted import ScriptedController


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


def train(directory):
    """A tiny run whose readings never move: a module freezes as soon as the window allows."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = {
        "policy": {"name": "egeria"},
        "plasticity": {"interval_steps": 1, "window": 2},
        "bootstrapping": {"change_threshold": 1.0},
        "controller": {"budget_share": 1000.0},
    }
    with attach(model, optimizer, config=config, directory=directory, controller=ScriptedController()) as run:
        for _ in range(40):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
            run.log(accuracy=0.5)
    return egeria.read_journal(directory)


@pytest.fixture
def run(tmp_path):
    """The directory of a run that froze all it could."""
    assert [event.module for event in train(tmp_path / "run").of(events.ModuleFrozen)] == [0, 1, 2]
    return tmp_path / "run"


def test_a_command_that_is_not_understood_ends_with_status_2(capsys):
    for arguments in [[], ["thaw"], ["report"], ["modules"], ["advise", "a:b", "--rounds", "three"]]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        printed = capsys.readouterr()
        assert end.value.code == 2 and printed.out == "" and "usage: egeria" in printed.err


def test_advise_measures_a_training_and_tells_what_a_plan_would_save(command, tmp_path):
    out = tmp_path / "advice.json"
    status, output, errors = command("advise", "cli_models:training", "--plan", "0.5:1", "--json", str(out))
    assert status == 0 and not errors
    assert "stem" in output and "orth" in output and "'0.5:1' would save" in output
    assert len(json.loads(out.read_text(encoding="utf8"))["costs"]) == 2


def test_advise_refuses_what_is_no_training_with_status_2(command):
    for path, said in [
        ("cli_models:named", "found Named"),
        ("cli_models:training_without_optimizer", "found ['data', 'model']"),
        ("cli_models", "package.module:callable"),
        ("cli_models:nothing_here", "AttributeError"),
    ]:
        status, output, errors = command("advise", path)
        assert status == 2 and not output
        assert errors.startswith("egeria advise: ") and said in errors


def test_modules_prints_the_cut_with_parameters_and_reasons(command):
    status, output, errors = command("modules", "cli_models:resnet")
    assert status == 0 and errors == ""
    total = sum(parameter.numel() for parameter in cifar_resnet(20).parameters())
    assert f"CifarResNet: {total:,} parameters in" in output
    rows = table(output)[1:] if table(output)[0][0] == "layer module" else table(output)
    assert sum(int(row[1].replace(",", "")) for row in rows) == total
    assert sum(float(row[2].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.5)
    assert "conv1" in rows[0][3] and rows[-1][4].endswith("Never frozen.")
    assert not any("Never frozen" in row[4] for row in rows[:-1])


def test_modules_says_that_it_took_the_order_of_the_definition(command):
    status, output, _ = command("modules", "cli_models:named")
    assert status == 0 and "In definition order" in output
    assert [row[0] for row in table(output)][-2:] == ["head", "stem"]


def test_modules_refuses_what_is_no_model_with_status_2(command):
    for path, said in [
        ("cli_models", "named as package.module:callable, found 'cli_models'"),
        ("no_such_module:resnet", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("cli_models:needs_an_argument", "'depth'. Write a function that builds it"),
        ("cli_models:fails", "RuntimeError: out of [bold]luck[/]"),
        ("cli_models:no_model", "must return a torch.nn.Module, found dict"),
        ("cli_models:single_layer", "at least two layers or blocks"),
    ]:
        status, output, errors = command("modules", path)
        assert (status, output) == (2, "")
        assert errors.startswith("egeria modules: ") and said in errors


def test_report_prints_the_summary_and_writes_the_page(run, command):
    status, output, errors = command("report", run)
    assert status == 0 and errors == ""
    assert "40 steps" in output and "3 of 4 modules" in output and "accuracy" in output
    assert "report.html" in output
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!")
