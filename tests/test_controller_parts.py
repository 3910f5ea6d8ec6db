"""The parts of the controller process that need no process: parcels, queues, the gate, the choice, the budget."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import time
import types
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from egeria.controller.child import Child, Heartbeat, Reports
from egeria.controller.process import choose, spare_cores, usable_cores
from egeria.controller.shared_memory import Segment, SharedQueue, pack, unpack
from egeria.controller.worker import HYSTERESIS, SAMPLE_S, LoadGate, load_of_others
from egeria.layers.batch import Batch
from egeria.layers.freezing import Freezer
from egeria.layers.modules import parse_modules
from egeria.session.timing import Budget, IntervalClock, count_iterations
from menagerie import each_supported

OPEN_FILES = Path("/proc/self/fd")


def sent(thing):
    """What arrives on the other side: packed into one mapping of the memory, unpacked from another."""
    segment = Segment()
    size_bytes = pack(thing, segment)
    return unpack(Segment(os.dup(segment.descriptor)), size_bytes)


# --- parcels -----------------------------------------------------------------------------------


def test_a_tensor_arrives_as_it_was():
    for tensor in [
        torch.randn(3, 4),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 6).T,
        torch.randn(8, 6)[::2, ::3],
        torch.randn(3, 1).expand(3, 5),
        torch.randint(0, 9, (5,)),
        torch.tensor([True, False]),
        torch.tensor(2.5),
        torch.empty(0, 7),
        torch.randn(3).to(torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
    ]:
        found = sent({"it": [tensor]})["it"][0]
        assert found.dtype == tensor.dtype and found.shape == tensor.shape
        assert torch.equal(found.to_dense(), tensor.to_dense()) if tensor.is_sparse else torch.equal(found, tensor)


def test_the_order_of_memory_arrives_too():
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert sent(image).is_contiguous(memory_format=torch.channels_last)


def test_what_arrives_is_a_copy_of_its_own():
    segment = Segment()
    found = unpack(segment, pack(torch.zeros(4), segment))
    pack(torch.ones(4), segment)
    assert found.tolist() == [0, 0, 0, 0]


def test_a_tensor_with_a_graph_arrives_without_it():
    weight = nn.Parameter(torch.ones(2))
    found, product = sent((weight, weight * 2))
    assert isinstance(found, nn.Parameter) and not found.requires_grad
    assert product.grad_fn is None and product.tolist() == [2, 2]


@each_supported
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_model_arrives_whole_with_its_ties_and_without_the_hooks_that_watch(specimen):
    torch.manual_seed(0)
    model = specimen.build().eval()
    lock_like = gc.get_objects  # a hook that holds on to what no pickle takes
    model.register_forward_hook(lambda *call: lock_like and None)
    found = sent(model)
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert not found._forward_hooks
    losses = []
    for network in (model, found):
        args, kwargs = specimen.example(torch.Generator().manual_seed(0))
        torch.manual_seed(1)
        losses.append(specimen.loss(network(*args, **kwargs)))
    torch.testing.assert_close(*losses)


def test_a_batch_arrives_with_everything_that_is_no_tensor():
    batch = Batch.of_call((torch.ones(2, 3),), {"mask": None, "mode": "x", "nested": {"ids": [torch.arange(2)]}}, "cpu")
    found = sent(batch)
    assert found.kwargs["mask"] is None and found.kwargs["mode"] == "x"
    assert found.kwargs["nested"]["ids"][0].tolist() == [0, 1] and found.autocast == batch.autocast


def test_a_model_can_be_sent_without_its_weights():
    model = nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000))
    weights = [*model.parameters(), *model.buffers()]
    segment = Segment()
    size_bytes = pack((model, torch.ones(3)), segment, without_values=weights)
    found, rest = unpack(segment, size_bytes)
    assert size_bytes < 20_000 and rest.tolist() == [1, 1, 1]
    assert [tensor.shape for tensor in found.state_dict().values()] == [
        tensor.shape for tensor in model.state_dict().values()
    ]


def test_the_hooks_of_frozen_layers_stay_behind_and_those_that_compute_weights_go_along():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4), nn.Linear(4, 4))
    Freezer(model, parse_modules(model)).freeze_to(1)
    assert len(model[0]._forward_pre_hooks) == 2
    assert len(sent(model)[0]._forward_pre_hooks) == 1


def test_what_cannot_be_pickled_says_so_and_the_queue_is_as_before():
    queue = SharedQueue(1)
    with pytest.raises(TypeError, match="pickle"):
        queue.put((torch.ones(2), (entry for entry in "no")))
    assert queue.put(1) is not None
    queue.close()


# --- queues ------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_takes_again_once_emptied():
    queue = SharedQueue(2)
    segments = [Segment(os.dup(segment.descriptor)) for segment in queue.segments]

    def take(slot):
        return unpack(segments[slot.number], slot.size_bytes)

    first, second = queue.put(torch.zeros(3)), queue.put(torch.ones(1000, 100))
    assert queue.put(torch.zeros(3)) is None
    assert take(first).tolist() == [0, 0, 0]
    queue.free.add(first.number)
    third = queue.put(torch.full((5000, 100), 2.0))  # larger than anything that lay there before
    assert third is not None and take(third).mean() == 2
    assert take(second).shape == (1000, 100)
    queue.close()


def test_memory_is_given_back(tmp_path):
    if not OPEN_FILES.is_dir():
        pytest.skip("no /proc here")
    gc.collect()
    before = len(list(OPEN_FILES.iterdir()))
    queue = SharedQueue(4)
    queue.put(torch.ones(1000))
    queue.close()
    forgotten = SharedQueue(4)
    forgotten.put(torch.ones(1000))
    del forgotten
    gc.collect()
    assert len(list(OPEN_FILES.iterdir())) == before


# --- when a process counts as lost ----------------------------------------------------------------


class StubbedProcess:
    pid, returncode = 0, 0

    def poll(self):
        return None

    def wait(self, timeout):
        return 0


@pytest.fixture
def child_and_pipe(monkeypatch):
    """A child with its end of the pipe in our hands, and nobody else at it."""
    pipe, theirs = multiprocessing.Pipe()
    monkeypatch.setattr("multiprocessing.Pipe", lambda: (pipe, Connection(os.dup(theirs.fileno()))))
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: StubbedProcess())
    child = Child({"memory": {}}, timeout_s=10)
    yield child, theirs
    child.end()
    theirs.close()


def test_silence_is_suffered_for_so_long_and_work_ten_times_as_long(child_and_pipe, monkeypatch):
    child, theirs = child_and_pipe
    begin = time.monotonic()

    def fault_after(seconds, *messages):
        monkeypatch.setattr("egeria.controller.child.time", types.SimpleNamespace(monotonic=lambda: begin + seconds))
        for message in messages:
            theirs.send(message)
        return child.receive()[1]

    assert not fault_after(90), "it has not come up yet"
    assert not fault_after(99, Reports((), 0.0)) and child.is_ready
    assert not fault_after(1000), "it has nothing to do"
    child.send("work")
    assert not fault_after(1009)
    assert fault_after(1011) == "it gave no sign of life for 10 s"
    assert not fault_after(1011, Reports((), 0.0))
    child.send("more")
    lost_after = next(seconds for seconds in range(1016, 1200, 5) if fault_after(seconds, Heartbeat()))
    assert 1011 + 100 <= lost_after <= 1011 + 110


# --- the gate ----------------------------------------------------------------------------------


class Machine:
    """A machine whose load and clock are told."""

    def __init__(self, load=0.0):
        self.load = load
        self.now = 0.0

    def gate(self, limit=0.5, patience_s=10.0):
        return LoadGate(limit, patience_s, load=lambda: self.load, clock=lambda: self.now)

    def wait(self, seconds=1.01 * SAMPLE_S):
        self.now += seconds


def test_the_gate_closes_above_the_limit_and_opens_below_it():
    machine = Machine()
    gate = machine.gate()
    machine.wait()
    assert gate.lets_through()
    machine.load = 0.51
    assert gate.lets_through(), "the load is sampled now and then, not at every question"
    machine.wait()
    assert not gate.lets_through()
    machine.load = 0.5 - HYSTERESIS / 2
    machine.wait()
    assert not gate.lets_through(), "once closed it takes a little less to open"
    machine.load = 0.5 - 2 * HYSTERESIS
    machine.wait()
    assert gate.lets_through()


def test_nothing_starves_behind_the_gate():
    machine = Machine(load=1.0)
    gate = machine.gate(patience_s=10)
    passed = []
    for _ in range(200):
        machine.wait()
        if gate.lets_through():
            passed.append(machine.now)
    assert len(passed) == 3  # in a little over 40 seconds; each wait begins with the next question
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(passed))


def test_a_limit_of_one_never_closes():
    machine = Machine(load=1.0)
    assert machine.gate(limit=1.0).lets_through()


def test_the_load_of_the_rest_leaves_out_our_own_work():
    process = psutil.Process()
    load_of_others(process)
    deadline = os.times().elapsed + 0.5
    while os.times().elapsed < deadline:
        sum(range(1000))
    assert 0 <= load_of_others(process) <= 1


# --- the choice --------------------------------------------------------------------------------


class Loader:
    num_workers = 3


def test_two_spare_cores_take_the_process(monkeypatch):
    monkeypatch.setattr("egeria.controller.process.usable_cores", lambda: 8.0)
    choice = choose("auto", "auto", nn.Linear(2, 2))
    assert (choice.kind, choice.device) == ("process", "cpu") and "8 cores" in choice.reason
    assert choose("auto", "auto", nn.Linear(2, 2), Loader()).kind == "process"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert choose("auto", "auto", nn.Linear(2, 2), Loader()).kind == "inline"
    assert choose("process", "auto", nn.Linear(2, 2), Loader()).kind == "process"
    assert choose("inline", "auto", nn.Linear(2, 2)).kind == "inline"


def test_the_workers_and_the_other_ranks_of_the_job_need_cores_too(monkeypatch):
    monkeypatch.setattr("egeria.controller.process.usable_cores", lambda: 16.0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert spare_cores() == 15
    assert spare_cores(Loader()) == 12
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert spare_cores(Loader()) == 0


def test_a_container_s_quota_counts(tmp_path):
    quota = tmp_path / "cpu.max"
    quota.write_text("150000 100000\n")
    assert usable_cores(quota) <= 1.5
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == usable_cores(tmp_path / "missing")


def test_a_reference_on_an_accelerator_needs_one():
    choice = choose("auto", "cuda", nn.Linear(2, 2))
    assert choice.device == "cpu" and "the model is not on one" in choice.reason


class Spread(nn.Linear):
    """Says that its parameters are on devices that this machine need not have."""

    def parameters(self, recurse=True):
        return (types.SimpleNamespace(device=torch.device(name)) for name in ("cpu", "cuda:1", "cuda:0"))


@pytest.mark.parametrize("setting", ["auto", "cuda"])
def test_a_reference_on_an_accelerator_is_on_that_of_the_model(setting, monkeypatch):
    monkeypatch.setattr("egeria.controller.process.usable_cores", lambda: 1.0)
    choice = choose("auto", setting, Spread(2, 2))
    assert (choice.kind, choice.device) == ("inline", "cuda:1")
    assert choose("process", "auto", Spread(2, 2)).device == "cpu"


# --- the budget --------------------------------------------------------------------------------


def spend(budget, count, iterations, interval_steps=100):
    found = []
    for _ in range(count):
        budget.note_evaluation(iterations)
        found.append(budget.review(interval_steps))
    return found


def test_evaluations_within_the_budget_change_nothing():
    assert spend(Budget(0.02, 10), 40, 2.0) == [None] * 40


def test_costly_evaluations_become_rarer_after_the_third():
    found = spend(Budget(0.02, 10), 3, 8.0)
    assert found[:2] == [None, None]
    assert found[2] == (400, "an evaluation takes as long as 8 iterations, 8.0% of 100 of them; the budget is 2.0%")


def test_later_two_reviews_must_agree():
    budget = Budget(0.02, 10)
    spend(budget, 3, 1.0)
    assert spend(budget, 10, 8.0) == [None] * 10
    assert spend(budget, 10, 1.0) == [None] * 10
    assert spend(budget, 20, 8.0)[-1][0] == 400


def test_a_single_slow_evaluation_is_forgiven():
    budget = Budget(0.02, 10)
    spend(budget, 3, 1.0)
    assert spend(budget, 1, 600.0) == [None]
    assert spend(budget, 19, 1.0) == [None] * 19


def test_no_spell_makes_evaluations_rarer_than_a_tenth():
    budget = Budget(0.02, 10)
    assert spend(budget, 3, 1e6)[-1][0] == 1000
    assert spend(budget, 40, 1e6, interval_steps=1000) == [None] * 40


def test_refreshes_count_with_their_share():
    budget = Budget(0.02, 10)
    budget.note_refresh(40.0, period=10)
    assert spend(budget, 3, 1.0)[-1][0] == 250
    again = Budget(0.02, 10)
    again.load_state_dict(budget.state_dict())
    assert again.state_dict() == budget.state_dict()


COUNTED = "the operations of an evaluation are those of {} iterations; the budget is 2.0%"


def test_the_interval_follows_the_count_for_each_layer_module():
    budget = Budget(0.02, 10)
    assert budget.expect(0.3, 10) == (15, COUNTED.format("0.3"))
    assert budget.expect(0.3, 15) is None
    assert budget.expect(0.5, 15) == (25, COUNTED.format("0.5"))
    assert budget.expect(0.1, 25) == (10, COUNTED.format("0.1"))  # never shorter than it was set
    assert budget.expect(90.0, 10) == (100, COUNTED.format("90"))  # nor ten times as long


def test_what_is_counted_is_measured_too_and_has_to_be_far_off_twice():
    budget = Budget(0.02, 10)
    budget.expect(0.3, 15)
    assert spend(budget, 40, 0.44, interval_steps=15) == [None] * 40
    assert spend(budget, 10, 0.9, interval_steps=15) == [None] * 10
    assert spend(budget, 10, 0.3, interval_steps=15) == [None] * 10
    assert spend(budget, 20, 0.9, interval_steps=15)[-1][0] == 45
    after, reason = budget.expect(0.4, 45)
    assert after == 50 and "0.6 were measured besides" in reason  # as much in the next module
    again = Budget(0.02, 10)
    again.load_state_dict(budget.state_dict())
    assert again.expect(0.4, 50) is None and again.expect(0.3, 50)[0] == 45


def test_iterations_are_counted_by_the_work_up_to_the_module_and_by_samples():
    for front, samples, expected in [(1.0, 2.0, 0.433), (0.3, 2.0, 0.2), (0.3, 0.5, 0.05)]:
        assert count_iterations(front, samples) == pytest.approx(expected, abs=1e-3)


def test_an_interval_that_grows_begins_where_the_last_one_ended():
    clock = IntervalClock(interval_steps=2)
    ends = []
    for _ in range(12):
        announced = clock.next_step_ends
        if clock.tick():
            assert announced
            ends.append(clock.step)
            clock.interval_steps = 4 if clock.step >= 4 else 2
    assert ends == [2, 4, 8, 12] and clock.evaluation == 4
    again = IntervalClock.from_state(asdict(clock))
    assert again == clock


def test_a_state_kept_in_memory_stays_what_it_was_when_it_was_saved():
    budget = Budget(0.01, 5)
    budget.note_evaluation(2.0)
    budget.note_refresh(1.0, 5)
    saved = budget.state_dict()
    budget.note_evaluation(9.0)
    budget.note_refresh(9.0, 5)
    assert (saved["evaluations"], saved["refreshes"]) == ([2.0], [0.2])
    again = Budget(0.01, 5)
    again.load_state_dict(saved)
    again.note_evaluation(9.0)
    assert saved["evaluations"] == [2.0]
