"""Wrong input of every kind, generated: each is taken or refused with an error of egeria, and nothing is half done."""

import copy
import io
import math
import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import egeria
from egeria import tree
from egeria.errors import EgeriaError, StateError

MANY = settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
ODD = [None, True, -1, 0, 10**400, -(2**70), math.nan, math.inf, "", "half", "0.5:1 0.2:3", "0.5:" + 5000 * "9", 1j]
ODD += [b"\0", "a\0b", [], [3], {}, {"policy": 5}, {"policy": {"name": []}}, {3: 4}, (), {1}, object(), object, print]
ODD += [Path("nowhere.toml"), torch.ones(2, 2), torch.tensor(math.nan), torch.tensor(1j), torch.ones((), device="meta")]
ODD += [nn.Linear(2, 2), iter([]), "https://user:secret@host/x", Path("s3://u:secret@h/x"), "nowhere.toml", range(3)]
ODD += [
    torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
]
odd = st.sampled_from(ODD)


def small():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def training(directory, **options):
    model, optimizer = small()
    config = {"cache": {"enabled": False}, **options.pop("config", {})}
    options = {"plan": "step 2:1 step 5:2", "total_steps": 20, "directory": directory, "config": config, **options}
    return model, optimizer, egeria.attach(model, optimizer, **options)


def make_steps(model, optimizer, run, count):
    for _ in range(count):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)


# --- arguments ------------------------------------------------------------------------------------

ARGUMENTS = {
    "attach": ["model", "optimizer", "loader", "scheduler", "total_steps", "config", "directory", "controller"],
    "attach too": ["policy", "plan", "log_to"],
    "plan": ["model", "optimizer", "total_steps", "epoch_steps", "config"],
    "advise": ["model", "optimizer", "loader", "loss", "config", "rounds"],
}


def call_with(call, wrong, tmp_path, model, optimizer):
    if call.startswith("attach"):
        egeria.attach(**{"model": model, "optimizer": optimizer, "directory": tmp_path / "run", **wrong}).close()
    elif call == "plan":
        egeria.plan(**{"model": model, "optimizer": optimizer, "total_steps": 20, **wrong})
    else:
        loss = {"loss": lambda model, batch: model(batch).mean(), "rounds": 1, **wrong}
        egeria.advise(**{"model": model, "optimizer": optimizer, "loader": [torch.ones(2, 4)], **loss})


@pytest.mark.parametrize("call", ARGUMENTS)
@MANY
@given(data=st.data())
def test_a_wrong_argument_is_taken_or_refused_and_the_model_is_left_alone(call, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = {data.draw(st.sampled_from(ARGUMENTS[call])): data.draw(odd)}
    if call == "advise" and wrong.get("rounds") is True:
        wrong = {}
    model, optimizer = small()
    before = copy.deepcopy(vars(model)), copy.deepcopy(model.state_dict())
    try:
        call_with(call, wrong, tmp_path, model, optimizer)
    except EgeriaError as error:
        assert "secret" not in str(error) and len(str(error)) < 2000
        assert str(error).count(".") >= 1, "no next step"
    assert all(torch.equal(before[1][name], entry) for name, entry in model.state_dict().items())
    assert vars(model).keys() == before[0].keys() and not model._forward_hooks and not model._forward_pre_hooks
    assert all(entry.requires_grad and entry.grad is None for entry in model.parameters())


@MANY
@given(value=odd, way=st.sampled_from(["step", "log", "on_event", "load_state_dict"]))
def test_a_wrong_value_leaves_a_run_as_it_is(value, way, tmp_path_factory):
    model, optimizer, run = training(tmp_path_factory.mktemp("run"))
    make_steps(model, optimizer, run, 3)
    calls = {"step": run.step, "log": lambda value: run.log(quality=value), "on_event": run.on_event}
    before = run.state_dict()
    try:
        {**calls, "load_state_dict": run.load_state_dict}[way](value)
    except EgeriaError as error:
        assert ("quality" in str(error) or way != "log") and len(str(error)) < 600
        assert tree.checksum(run.state_dict()) == tree.checksum(before)
    make_steps(model, optimizer, run, 3)
    assert run.frozen == 2
    run.close()


@pytest.mark.parametrize("value", [entry for entry in ODD if isinstance(entry, (torch.Tensor, complex))])
def test_what_is_no_number_is_no_loss_and_no_metric(value, tmp_path):
    run = training(tmp_path)[2]
    if not (isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.isnan().any()):
        with pytest.raises(EgeriaError, match=r"run\.step takes a loss as a number"):
            run.step(value)
        with pytest.raises(EgeriaError, match=r"run\.log takes quality as a number"):
            run.log(quality=value)
    for state in (run.state_dict() | {"schema": value}, {"schema": value}, value):
        with pytest.raises(StateError):
            run.load_state_dict(state)
    run.close()


@MANY
@given(value=odd, way=st.sampled_from(["from_dict", "from_toml", "load", "parse", "read_journal", "report"]))
def test_what_reads_texts_and_files_refuses_what_is_none(value, way, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ways = {name: getattr(egeria.Config, name) for name in ("from_dict", "from_toml", "load")}
    ways |= {"parse": egeria.policy.Plan.parse, "read_journal": egeria.read_journal, "report": egeria.report}
    try:
        ways[way](value)
    except EgeriaError as error:
        assert len(str(error)) < 2000
    assert list(tmp_path.iterdir()) == []


# --- states ---------------------------------------------------------------------------------------


def places(value, place=()):
    """Yield the place of everything in a state."""
    yield place
    if isinstance(value, (dict, list, tuple)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(entry, (*place, key))


def changed(state, place, value):
    """Return a copy of a state with another value in a place, or without it."""
    if not place:
        return value
    copied = copy.copy(state) if isinstance(state, dict) else list(state)
    if len(place) == 1 and value is ...:
        del copied[place[0]]
    else:
        copied[place[0]] = changed(state[place[0]], place[1:], value)
    return copied


@pytest.mark.parametrize("policy", ["plan", "egeria"])
def test_a_damaged_state_is_refused_and_nothing_has_changed(policy, tmp_path):
    options = {} if policy == "plan" else {"plan": None, "policy": "egeria", "controller": "inline"}
    fast = {"plasticity": {"interval_steps": 2}, "bootstrapping": {"change_threshold": 0.9}}
    model, optimizer, run = training(tmp_path, config=fast, **options)
    make_steps(model, optimizer, run, 10)
    state = run.state_dict()
    make_steps(model, optimizer, run, 2)
    weights, before = copy.deepcopy(model.state_dict()), run.state_dict()
    trained = [entry.requires_grad for entry in model.parameters()]
    every = [place for place in places(state) if place]
    assert len(every) > 60

    @MANY
    @given(
        place=st.sampled_from(every),
        value=st.one_of(
            odd.filter(lambda v: not getattr(v, "is_meta", False)), st.integers(), st.floats(), st.just(...)
        ),
    )
    def refuses(place, value):
        if value is not ... and tree.checksum(changed(state, place, value)) == tree.checksum(state):
            return
        with pytest.raises(StateError) as caught:
            run.load_state_dict(changed(state, place, value))
        assert len(str(caught.value)) < 600
        assert tree.checksum(run.state_dict()) == tree.checksum(before)
        assert [entry.requires_grad for entry in model.parameters()] == trained
        assert all(torch.equal(weights[name], entry) for name, entry in model.state_dict().items())

    refuses()
    run.load_state_dict(state)
    assert run.summary().step == 10
    run.close()


# --- files that run code --------------------------------------------------------------------------


class Harmful:
    """Runs code when it is unpickled without `weights_only=True`."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return Path.touch, (self.place,)


def test_nothing_that_is_read_runs_code(tmp_path):
    model, optimizer, run = training(tmp_path / "run")
    make_steps(model, optimizer, run, 3)
    torch.save({**run.state_dict(), "engine": Harmful(tmp_path / "harm")}, file := io.BytesIO())
    with pytest.raises(StateError, match="cannot be read"):
        run.packed.load_state_dict({"state": file.getvalue()})
    assert not (tmp_path / "harm").exists()
    run.close()


def test_every_file_is_read_with_weights_only():
    calls = [
        f"{path.name}: {line.strip()}"
        for path in Path(egeria.__file__).parent.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"torch\.load\(|pickle\.loads?\(", line) and "weights_only=True" not in line
    ]
    # A file without a name, of the controller process that we start, and what the ranks of a job exchange.
    assert sorted(call.partition(":")[0] for call in calls) == ["process.py", "ranks.py"]
