"""Memory, energy and money: what a freeze gives back beside time, and what is said where it cannot be known."""

from __future__ import annotations

import itertools
import json
import sys
import time
import types
import warnings
import weakref

import pytest
import torch
from torch import nn

from egeria import attach, events
from egeria.journal import read_journal
from egeria.layers.batch import Batch
from egeria.layers.freezing import ReleasedState
from egeria.layers.memory import activation_bytes
from egeria.layers.modules import parse_modules
from egeria.report import report
from egeria.session import EgeriaWarning

STEPS, ROWS, WIDTH = 40, 16, 24
FROZEN_AT = {"policy": {"plan": "0.5:2"}, "plasticity": {"interval_steps": 4}}


def network():
    torch.manual_seed(0)
    sizes = [8, WIDTH, WIDTH, WIDTH]
    blocks = [nn.Sequential(nn.Linear(before, after), nn.ReLU()) for before, after in itertools.pairwise(sizes)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 3))


def train(folder, model=None, *, steps=STEPS, inputs=None, optimizer=None, at_step=lambda run, step: None, **settings):
    """Train with the first two layer modules frozen from half on; return the run, closed, and the optimizer."""
    model = network() if model is None else model
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs = torch.randn(ROWS, 8) if inputs is None else inputs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EgeriaWarning)
        with attach(model, optimizer, total_steps=steps, directory=folder, config=FROZEN_AT | settings) as run:
            for step in range(1, steps + 1):
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
                at_step(run, step)
    return run, optimizer


def events_of(folder, kind):
    return [event for event in read_journal(folder).events if isinstance(event, kind)]


def kept_by(model, inputs):
    """Return the bytes that a forward pass of the loop itself keeps, told apart from the model's own by hand."""
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    found = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        found.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept_alive = model(inputs)
    assert kept_alive.requires_grad
    return sum(size for place, size in found.items() if place not in own)


def test_the_activations_counted_are_those_that_the_loop_keeps_before_and_after_the_freeze(tmp_path):
    model, inputs = network(), torch.randn(ROWS, 8)
    kept = {}
    train(tmp_path, model, inputs=inputs, at_step=lambda run, step: kept.update({run.frozen: kept_by(model, inputs)}))
    (profile,) = events_of(tmp_path, events.MemoryProfiled)
    assert set(kept) == {0, 2}
    assert sum(profile.activations) == kept[0]
    assert sum(profile.activations[2:]) == kept[2]
    assert kept[2] < kept[0]


class Noted(nn.Module):
    """Tells what it put out, as long as anything holds that."""

    def __init__(self, given):
        super().__init__()
        self.linear, self.tell = nn.Linear(8, 8), given.append

    def forward(self, inputs):
        output = torch.sigmoid(self.linear(inputs))
        self.tell(weakref.ref(output))
        return output


def test_counting_leaves_nothing_behind():
    """A hook that hands on what it is given would keep the graph of a pass that no backward pass follows."""
    given = []
    model, inputs = nn.Sequential(*(Noted(given) for _ in range(3))), torch.randn(16, 8)
    found = activation_bytes(model, parse_modules(model), Batch.of_call((inputs,), {}, "cpu"))
    assert sum(found) >= 3 * inputs.numel() * 4
    assert len(given) == 3
    assert not any(reference() is not None for reference in given)


def test_a_lazy_model_or_a_data_set_that_raises_keeps_nothing_from_beginning(tmp_path):
    class Raising(torch.utils.data.TensorDataset):
        def __len__(self):
            raise RuntimeError("no length today")

    class Loader:
        dataset = Raising(torch.ones(4, 8))

        def __iter__(self):
            return iter([])

    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.warns(EgeriaWarning, match="lazy"):
        attach(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1), directory=tmp_path / "lazy").close()
    model = network()
    run = attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Loader(), total_steps=4, directory=tmp_path / "raising"
    )
    run.close()
    assert report(tmp_path / "raising").summary.title == "Sequential on Raising"


def test_gradients_and_adam_state_are_counted_by_layer_module(tmp_path):
    train(tmp_path)
    (profile,) = events_of(tmp_path, events.MemoryProfiled)
    sizes = [8 * WIDTH + WIDTH, WIDTH * WIDTH + WIDTH, WIDTH * WIDTH + WIDTH, WIDTH * 3 + 3]
    assert profile.gradients == [4 * size for size in sizes]
    # Two moments, and a counter of steps for each of two parameters.
    assert profile.optimizer_state == [2 * 4 * size + 2 * 4 for size in sizes]


def test_the_report_the_summary_and_the_trackers_tell_the_memory_freed(tmp_path):
    logged = {}
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    config = FROZEN_AT | {"freezing": {"release_optimizer_state": "drop"}}
    run = attach(
        model,
        optimizer,
        total_steps=STEPS,
        directory=tmp_path,
        config=config,
        log_to=lambda values, _: logged.update(values),
    )
    for _ in range(STEPS):
        loss = model(torch.randn(ROWS, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    live = run.summary().memory_freed_bytes
    run.close()
    (profile,) = events_of(tmp_path, events.MemoryProfiled)
    expected = sum(sum(part[:2]) for part in (profile.activations, profile.gradients, profile.optimizer_state))
    found = report(tmp_path)
    assert found.summary.beside.freed.num_bytes == live == logged["egeria/memory_freed_bytes"] == expected
    assert "memory freed" in str(found)
    assert "optimizer state" in str(found)


def test_what_is_not_measured_is_said_on_the_page_with_the_way_to_it(tmp_path):
    train(tmp_path)
    page = report(tmp_path).path.read_text(encoding="utf-8")
    assert "not known: accounts.energy is off" in page
    assert "not known: accounts.peak_memory is off" in page


def test_a_resumed_run_keeps_what_was_counted_while_everything_was_in_training(tmp_path):
    model, inputs = network(), torch.randn(ROWS, 8)
    saved = {}
    train(tmp_path, model, inputs=inputs, at_step=lambda run, step: saved.update({step: run.state_dict()}))
    before = report(tmp_path).summary.beside.freed
    resumed = attach(
        model, torch.optim.Adam(model.parameters()), total_steps=STEPS, directory=tmp_path, config=FROZEN_AT
    )
    resumed.load_state_dict(saved[36])
    for _ in range(4):
        loss = model(inputs).square().mean()
        loss.backward()
        resumed.step(loss)
    resumed.close()
    assert report(tmp_path).summary.beside.freed == before


def test_a_run_resumed_with_dropped_state_still_tells_it(tmp_path):
    drops = {"freezing": {"release_optimizer_state": "drop"}}
    model, inputs, saved = network(), torch.randn(ROWS, 8), {}
    follow = lambda run, step: saved.update({step: (run.state_dict(), optimizer.state_dict())})  # noqa: E731
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train(tmp_path, model, inputs=inputs, optimizer=optimizer, at_step=follow, **drops)
    before = report(tmp_path).summary.beside.freed
    assert before.optimizer_state > 0
    optimizer.load_state_dict(saved[36][1])
    run = attach(model, optimizer, total_steps=STEPS, directory=tmp_path, config=FROZEN_AT | drops)
    run.load_state_dict(saved[36][0])
    run.close()
    assert report(tmp_path).summary.beside.freed == before


class TestReleasedState:
    def test_dropped_state_is_gone_while_frozen_and_begins_anew_after_a_thaw(self, tmp_path):
        model, seen = network(), {}
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        front = [*model[0].parameters(), *model[1].parameters()]
        settings = {
            "policy": {"plan": "0.3:2 0.6:0"},
            "freezing": {"release_optimizer_state": "drop"},
        }
        train(
            tmp_path,
            model,
            optimizer=optimizer,
            at_step=lambda run, step: seen.update({step: [len(optimizer.state.get(p, ())) for p in front]}),
            **settings,
        )
        assert seen[8] == [3] * 4
        assert seen[20] == [0] * 4
        assert seen[40] == [3] * 4
        assert report(tmp_path).summary.beside.freed.num_bytes == 0, "everything trains again"

    def test_kept_is_the_default(self, tmp_path):
        model = network()
        _, optimizer = train(tmp_path, model)
        assert all(len(optimizer.state[parameter]) == 3 for parameter in model.parameters())
        assert report(tmp_path).summary.beside.freed.optimizer_state == 0

    def test_on_the_cpu_there_is_nothing_to_move_which_is_said(self, tmp_path):
        model = network()
        _, optimizer = train(tmp_path, model, freezing={"release_optimizer_state": "cpu"})
        (declined,) = [event for event in events_of(tmp_path, events.Declined) if "optimizer" in event.what]
        assert "main memory already" in declined.reason
        assert all(len(optimizer.state[parameter]) == 3 for parameter in model.parameters())

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")
    def test_state_moved_to_main_memory_comes_back_as_it_was(self):
        parameters = [nn.Parameter(torch.randn(5, device="cuda")) for _ in range(3)]
        optimizer = torch.optim.Adam(parameters)
        torch.stack(parameters).sum().backward()
        optimizer.step()
        before = {parameter: {k: v.clone() for k, v in optimizer.state[parameter].items()} for parameter in parameters}
        state = ReleasedState([optimizer], drops=False)
        state.follow(parameters[:2])
        assert {v.device.type for v in optimizer.state[parameters[0]].values()} == {"cpu"}
        assert optimizer.state[parameters[2]]["exp_avg"].is_cuda
        state.follow(())
        for parameter in parameters:
            for name, value in optimizer.state[parameter].items():
                assert value.device == before[parameter][name].device
                assert torch.equal(value, before[parameter][name])

    def test_where_state_cannot_come_back_the_optimizer_begins_anew_rather_than_fail(self, monkeypatch):
        monkeypatch.setattr("egeria.layers.freezing.CPU", torch.device("meta"))  # from where nothing comes back
        parameters = [nn.Parameter(torch.randn(5)) for _ in range(2)]
        optimizer = torch.optim.Adam(parameters)
        torch.stack(parameters).sum().backward()
        optimizer.step()
        state = ReleasedState([optimizer], drops=False)
        state.follow(parameters[:1])
        assert optimizer.state[parameters[0]]["exp_avg"].is_meta
        parameters[0].grad = None
        optimizer.step()
        assert optimizer.state[parameters[0]]["exp_avg"].is_meta, "nothing asked for it"
        parameters[0].grad = torch.ones(5)  # the loop trains it nevertheless
        optimizer.step()
        assert optimizer.state[parameters[0]]["exp_avg"].tolist() == pytest.approx([0.1] * 5)
        assert optimizer.state[parameters[1]]["step"] == 3
        state.follow(())
        assert not optimizer._optimizer_step_pre_hooks

    def test_a_loop_that_loads_a_checkpoint_while_frozen_is_no_trouble(self):
        parameters = [nn.Parameter(torch.randn(5)) for _ in range(2)]
        optimizer = torch.optim.Adam(parameters)
        torch.stack(parameters).sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        state = ReleasedState([optimizer], drops=True)
        state.follow(parameters[:1])
        optimizer.load_state_dict(saved)
        state.follow(())
        assert len(optimizer.state[parameters[0]]) == 3


class Monitor:
    """Stands for Zeus' monitor: 5 J for each window, 3 J where the front is frozen."""

    frozen = fails = False
    cpu_indices: tuple[int, ...] = (0,)

    takes_s = 0.0

    def __init__(self, gpu_indices=None):
        time.sleep(self.takes_s)
        self.gpu_indices = gpu_indices

    def begin_window(self, key, sync_execution=True):
        assert not sync_execution

    def end_window(self, key, sync_execution=True):
        assert not sync_execution
        if Monitor.fails:
            raise OSError("the counter went away")
        cpu = {0: 2.0 if Monitor.frozen else 4.0}
        return types.SimpleNamespace(gpu_energy={}, cpu_energy=cpu, dram_energy={0: 1.0})


@pytest.fixture
def zeus(monkeypatch):
    monkeypatch.setattr(Monitor, "frozen", False)
    monkeypatch.setattr(Monitor, "fails", False)
    package, module = types.ModuleType("zeus"), types.ModuleType("zeus.monitor")
    module.ZeusMonitor = package.monitor = Monitor
    monkeypatch.setitem(sys.modules, "zeus", package)
    monkeypatch.setitem(sys.modules, "zeus.monitor", module)


ENERGY = {"energy": True}


class TestEnergy:
    def test_used_is_what_the_counters_say(self, tmp_path, zeus):
        def follow(run, step):
            Monitor.frozen = run.frozen > 0

        train(tmp_path, at_step=follow, accounts=ENERGY)
        intervals = events_of(tmp_path, events.IntervalMeasured)
        frozen = sum(entry.frozen > 0 for entry in intervals)
        energy = report(tmp_path).summary.beside.energy
        assert 0 < frozen < len(intervals) == STEPS / 4
        assert energy.used == 5.0 * (len(intervals) - frozen) + 3.0 * frozen
        assert f"{energy.used:.3g} J used" in str(report(tmp_path)).replace("\N{NO-BREAK SPACE}", " ")
        assert energy.saved is not None
        windows = [entry.energy_window_s for entry in intervals]
        assert all(window > 0 for window in windows)
        took_s = [entry.iteration_wall_s * entry.num_steps for entry in intervals]
        assert sum(windows) > 0.5 * sum(took_s), "iterations are most of it"

    def test_making_the_counter_is_no_part_of_an_interval(self, tmp_path, zeus, monkeypatch):
        monkeypatch.setattr(Monitor, "takes_s", 0.5)
        train(tmp_path, accounts=ENERGY)
        first, *_ = events_of(tmp_path, events.IntervalMeasured)
        assert first.energy_window_s < 0.5

    def test_what_measuring_took_is_no_saving_of_the_freeze_behind_it(self, tmp_path, zeus):
        train(tmp_path, accounts=ENERGY)
        path = tmp_path / "journal.jsonl"
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        intervals = [entry for entry in entries if entry["event"] == "interval"]
        for entry in intervals:  # 10 W at all times; an iteration takes 1 s, and 0.75 s behind the freeze
            is_frozen = entry["frozen"] > 0
            pace, ours = (0.75, 0.0) if is_frozen else (1.0, 2.0)  # and 2 s of measuring in each interval before it
            window = pace * entry["num_steps"] + ours
            entry |= {"iteration_wall_s": pace, "energy_window_s": window, "energy_j": 10 * window}
        num_frozen = sum(entry["num_steps"] for entry in intervals if entry["frozen"])
        (closed,) = [entry for entry in entries if entry["event"] == "run_closed"]
        closed["overhead_wall_s"] = overhead_s = 2.0 * sum(not entry["frozen"] for entry in intervals)
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        energy = report(tmp_path).summary.beside.energy
        assert energy.saved == pytest.approx(10 * (0.25 * num_frozen - overhead_s))
        assert energy.used + energy.saved == pytest.approx(10 * 1.0 * STEPS), "what plain training would have used"
        for entry in intervals[1::2]:  # of these the counter told nothing
            entry |= {"energy_j": None, "energy_window_s": None}
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        measured = sum(entry["num_steps"] for entry in intervals[::2] if entry["frozen"])
        part = sum(entry["num_steps"] for entry in intervals[::2]) / STEPS
        found = report(tmp_path).summary.beside.energy
        assert found.saved == pytest.approx(10 * (0.25 * measured - part * overhead_s))
        for entry in intervals:  # as of an earlier version
            entry["energy_window_s"] = None
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        assert report(tmp_path).summary.beside.energy.saved is None
        assert "saved is not known" in " ".join(str(report(tmp_path)).replace("│", "").split())

    def test_the_part_of_an_interval_that_a_resumed_run_sees_is_left_out(self, tmp_path, zeus):
        saved = {}
        model, _ = network(), None
        train(
            tmp_path / "first", model, at_step=lambda run, step: saved.update({step: run.state_dict()}), accounts=ENERGY
        )
        optimizer = torch.optim.Adam(model.parameters())
        run = attach(
            model, optimizer, total_steps=STEPS, directory=tmp_path / "second", config=FROZEN_AT | {"accounts": ENERGY}
        )
        run.load_state_dict(saved[30])  # intervals of four steps
        for _ in range(10):
            loss = model(torch.randn(ROWS, 8)).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss)
        run.close()
        found = [entry.energy_j for entry in events_of(tmp_path / "second", events.IntervalMeasured)]
        assert found[0] is None
        assert found[1:] and None not in found[1:]

    def test_without_zeus_the_report_says_how_to_get_it(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "zeus.monitor", None)
        run, _ = train(tmp_path, accounts=ENERGY)
        assert run.summary().energy_saved_j is None
        page = report(tmp_path).path.read_text(encoding="utf-8")
        assert "egeria[energy]" in page

    def test_a_machine_without_counters_is_said_to_have_none(self, tmp_path, zeus, monkeypatch):
        monkeypatch.setattr(Monitor, "cpu_indices", ())
        train(tmp_path, accounts=ENERGY)
        assert "no counter can be read" in report(tmp_path).path.read_text(encoding="utf-8")

    def test_a_counter_that_fails_costs_no_more_than_its_numbers(self, tmp_path, zeus):
        def follow(run, step):
            Monitor.fails = step > 20

        run, _ = train(tmp_path, at_step=follow, accounts=ENERGY)
        assert run.summary().frozen == 2
        found = report(tmp_path)
        assert found.summary.beside.energy.used == 5.0 * 5
        assert ("measuring energy", "the counter went away") in found.summary.declined


class TestPeakMemory:
    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of an interval")
    def test_the_peak_of_resident_memory_falls_by_much_of_what_the_front_kept(self, tmp_path):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
        model = nn.Sequential(*blocks, nn.Linear(8, 1))
        inputs = torch.randn(1_200_000, 8)  # 38 MB: given back to the system as soon as nobody holds it
        settings = {"accounts": {"peak_memory": True}, "plasticity": {"interval_steps": 2}}
        settings["policy"] = {"plan": "0.5:5"}
        train(tmp_path, model, inputs=inputs, steps=20, cache={"enabled": False}, **settings)
        peak = report(tmp_path).summary.beside.peak
        (profile,) = events_of(tmp_path, events.MemoryProfiled)
        counted = sum(profile.activations[:5])
        assert counted >= 5 * inputs.numel() * 4
        assert 0.5 * counted < peak.unfrozen - peak.now < 1.2 * counted
        assert "peak memory" in str(report(tmp_path))

    def test_elsewhere_it_is_declined(self, tmp_path, monkeypatch):
        monkeypatch.setattr("egeria.session.measuring.accounts.RESET", tmp_path / "nothing")
        train(tmp_path / "run", accounts={"peak_memory": True})
        assert "only Linux tells the peak" in report(tmp_path / "run").path.read_text(encoding="utf-8")

    def test_without_being_asked_no_counter_is_set_back(self, tmp_path, monkeypatch):
        written = tmp_path / "clear_refs"
        written.write_text("untouched")
        monkeypatch.setattr("egeria.session.measuring.accounts.RESET", written)
        train(tmp_path / "run")
        assert written.read_text() == "untouched"


def test_money_is_the_time_saved_by_the_price_of_an_hour(tmp_path):
    train(tmp_path, accounts={"price_per_hour": 7.2, "currency": "EUR"})
    found = report(tmp_path)
    assert found.summary.beside.money == pytest.approx(found.summary.wall.saved_s / 500)
    assert "EUR" in str(found)
