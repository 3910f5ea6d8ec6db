"""Landing in two processes: decided, checked and frozen alike, with equal weights, also where one has a fault."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from egeria import EgeriaWarning, attach, read_journal
from egeria.events import FaultCaught, LandingBegan, LandingEnded
from egeria.layers.landing import AveragedWeights
from egeria.parallel import Replicas
from egeria.session.measuring.optimizer_steps import ScaledSteps
from loops import Loop, differences
from menagerie import SPECIMENS, SUPPORTED_NAMES
from ranks import each_third, run_cases, run_ranks
from test_duty_cycle import MLP, OPTIMIZERS
from test_landing import attached, failing
from test_shards import AS_ONE, NOT_SHARDED, ROUNDED, shard, sharded, whole

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
SCHEDULE = "0.02:1 0.04:9 0.24:0"
STEPS = 28


def course_of(name, folder, *, in_parts=False):
    """Train with landings, a freeze, and a thaw; return what was in force after each step, and the end."""
    specimen, several = SPECIMENS[name], {}
    if distributed.get_world_size() > 1:
        specimen = sharded(specimen) if in_parts else specimen
        several = {} if in_parts else {"parallel": Replicas(find_unused_parameters=True)}
    loop = Loop(specimen, attached("both", Path(folder, name), SCHEDULE) | several)
    course = []
    for _ in range(STEPS):
        loop.step()
        course.append((loop.run.frozen, loop.run.summary().landing))
    loop.run.close()
    return course, whole(loop.everything())


def in_parts(name, folder):
    return course_of(name, folder, in_parts=True)


def landings(folder):
    journal = read_journal(folder)
    return [event.to_dict() for event in (*journal.of(LandingBegan), *journal.of(LandingEnded))]


@pytest.mark.parametrize("name", each_third(SUPPORTED_NAMES))
def test_law_6_two_ranks_land_like_one(name, tmp_path):
    [(course, end)] = run_ranks(course_of, name, str(tmp_path / "one"), num_ranks=1)
    for also, found in run_ranks(course_of, name, str(tmp_path / "two")):
        assert also == course
        assert differences(found, end) == []
    assert landings(tmp_path / "one" / name) == landings(tmp_path / "two" / name)
    assert not read_journal(tmp_path / "two" / name).of(FaultCaught)


IN_PARTS = [name for name in SUPPORTED_NAMES if name not in NOT_SHARDED.keys() | ROUNDED]


@pytest.mark.parametrize("name", each_third(IN_PARTS, always=AS_ONE))
def test_two_ranks_that_share_the_parameters_land_like_one(name, tmp_path):
    [(course, end)] = run_ranks(in_parts, name, str(tmp_path / "one"), num_ranks=1)
    for also, found in run_ranks(in_parts, name, str(tmp_path / "two")):
        assert also == course
        assert differences(found, end) == []
    assert landings(tmp_path / "one" / name) == landings(tmp_path / "two" / name)
    assert not read_journal(tmp_path / "two" / name).of(FaultCaught)


# --- data of one's own --------------------------------------------------------------------------


class Replica:
    """An MLP in each of two processes, on data of its own."""

    def __init__(self, directory, *, in_parts=False):
        torch.manual_seed(0)
        self.model = MLP().train()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.called = shard(self.model) if in_parts else DistributedDataParallel(self.model)
        self.optimizer = OPTIMIZERS["adamw"](self.model.parameters())
        self.data = torch.Generator().manual_seed(distributed.get_rank())
        self.run = attach(self.called, self.optimizer, **attached("both", directory, "0.02:2"))

    def go(self, steps):
        for _ in range(steps):
            inputs = torch.randn(16, 8, generator=self.data)
            loss = nn.functional.cross_entropy(self.called(inputs), (inputs.sum(1) > 0).long())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EgeriaWarning)
                self.run.step(loss)
        return self

    def state(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def landed(fault):
    """Land, with a fault in the second process; return the weights as they were at each step."""
    owner, name = fault
    kept = getattr(owner, name) if owner else None
    replica = Replica("journal")
    if owner and distributed.get_rank() == 1:
        setattr(owner, name, failing)
    try:
        course = [(replica.go(1).run.frozen, replica.state()) for _ in range(16)]
    finally:
        if owner:
            setattr(owner, name, kept)
    replica.run.close()
    outcomes = [event.outcome for event in read_journal("journal").of(LandingEnded)]
    return course, outcomes if distributed.get_rank() == 0 else None


FAULTS = [
    (None, ""),
    (AveragedWeights, "__post_init__"),
    (AveragedWeights, "take_in"),
    (AveragedWeights, "put_in"),
    (AveragedWeights, "use_statistics"),
    (ScaledSteps, "_scale"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[1] or "none")
def test_ranks_decide_alike_and_end_with_equal_weights(fault):
    (first, outcomes), (second, _) = run_ranks(landed, fault)
    assert [frozen for frozen, _ in first] == [frozen for frozen, _ in second]
    (depth, end), (_, also) = first[-1], second[-1]
    assert depth == 2
    parameters = [name for name, _ in MLP().named_parameters()]
    assert [name for name in parameters if not torch.equal(end[name], also[name])] == []
    if fault[1] == "":
        assert outcomes == ["landed"] or outcomes == ["undone"]
        assert all(torch.equal(end[name], also[name]) for name in end if name.startswith(("blocks.0", "blocks.1")))
    else:
        assert outcomes == ["failed"]


def resumed(case):
    stop, in_parts, packed = case
    one = Replica("whole", in_parts=in_parts).go(16)
    ends = [whole(one.state())]
    one.run.close()
    first = Replica("parts", in_parts=in_parts).go(stop)
    state_of = first.run.packed if packed else first.run
    saved = [copy.deepcopy(part.state_dict()) for part in (first.model, first.optimizer, state_of)]
    if packed:  # all processes load that of the first
        distributed.broadcast_object_list(shared := [saved[2]], src=0)
        saved[2] = shared[0]
    first.run.close()
    second = Replica("parts", in_parts=in_parts)
    for part, state in zip((second.model, second.optimizer), saved, strict=False):
        part.load_state_dict(state)
    (second.run.packed if packed else second.run).load_state_dict(saved[2])
    second.data.set_state(first.data.get_state())
    ends.append(whole(second.go(16 - stop).state()))
    frozen = second.run.frozen
    second.run.close()
    faults = len(read_journal("parts").of(FaultCaught)) if distributed.get_rank() == 0 else 0
    return ends, frozen, faults


RESUMED = [(stop, *case) for stop in (4, 9) for case in ((False, False), (False, True), (True, False), (True, True))]


def test_law_5_in_mid_landing_with_two_ranks():
    for (stop, in_parts, packed), answers in run_cases(resumed, RESUMED).items():
        case = f"after {stop} steps, {in_parts=}, {packed=}"
        for (one, other), frozen, faults in answers:
            assert (frozen, faults) == (2, 0), case
            names = list(one)
            if packed:  # statistics are each process' own, and so are averages of parameters in parts
                names = [] if in_parts else [name for name, _ in MLP().named_parameters()]
            assert [name for name in names if not torch.equal(one[name], other[name])] == [], case
