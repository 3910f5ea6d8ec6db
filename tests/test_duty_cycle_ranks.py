"""Layer modules that rest at some steps, trained by two processes: as by one, and nothing is made anew at a step."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import egeria.parallel.strategies
from egeria import attach, read_journal
from egeria.events import Declined, FaultCaught, PeriodsChanged
from egeria.parallel import Replicas
from egeria.session import EgeriaWarning
from loops import Loop, differences
from menagerie import SPECIMENS, SUPPORTED_NAMES
from ranks import each_third, run_cases, run_ranks
from test_duty_cycle import MLP, OPTIMIZERS, attached, static
from test_shards import AS_ONE, NOT_SHARDED, ROUNDED, sharded, whole

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
SCHEDULE = "0.05:1/8,2/4,9/2 0.3:1,9/2 0.5:0,9/4 0.6:0"


def train(name, folder):
    """Train with periods, a freeze among them, and a thaw; return what was in force after each step, and the end."""
    several = {"parallel": Replicas(find_unused_parameters=True)} if distributed.get_world_size() > 1 else {}
    loop = Loop(SPECIMENS[name], attached(Path(folder, name), SCHEDULE) | several)
    course = []
    for _ in range(28):
        loop.step()
        course.append((loop.run.frozen, loop.run.periods))
    loop.run.close()
    return course, loop.everything()


@pytest.mark.parametrize("name", each_third(SUPPORTED_NAMES, always=["stochastic_depth"]))
def test_law_6_two_ranks_train_like_one(name, tmp_path):
    [(course, end)] = run_ranks(train, name, str(tmp_path / "one"), num_ranks=1)
    for also, found in run_ranks(train, name, str(tmp_path / "two")):
        assert also == course
        assert differences(found, end) == []
    journals = [read_journal(tmp_path / folder / name) for folder in ("one", "two")]
    decided = [[event.to_dict() for event in journal.of(PeriodsChanged)] for journal in journals]
    assert decided[0] == decided[1]
    assert decided[0] or journals[0].of(Declined)
    assert not journals[1].of(FaultCaught)


# --- DistributedDataParallel, as it was built ---------------------------------------------------


@dataclasses.dataclass
class Replica:
    """An MLP in each of two processes, on data of its own; periods 8, 4, 2 from the third step on."""

    micro: int = 1
    to_none: bool = True

    def __post_init__(self):
        torch.manual_seed(0)
        self.model = MLP().train()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.optimizer = OPTIMIZERS["adamw"](self.model.parameters())
        self.data = torch.Generator().manual_seed(distributed.get_rank())

    def loss(self, model):
        inputs = torch.randn(16, 8, generator=self.data)
        return nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long()) / self.micro

    def backward(self, called):
        for _ in range(self.micro - 1):
            with called.no_sync():
                self.loss(called).backward()
        loss = self.loss(called)
        loss.backward()
        return loss

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.to_none)


def by_hand(steps, **options):
    """Train with gradients that the loop leaves out and averages itself."""
    replica = Replica(**options)
    for step in range(1, steps + 1):
        for block, period in zip(replica.model.blocks, (8, 4, 2), strict=False):
            is_due = step < 3 or step % period == 0
            block.requires_grad_(is_due)
            for parameter in () if is_due else block.parameters():
                parameter.grad = None
        for _ in range(replica.micro):
            replica.loss(replica.model).backward()
        for parameter in replica.model.parameters():
            if parameter.requires_grad:
                distributed.all_reduce(parameter.grad.div_(2))
        replica.update()
    return [parameter.detach().clone() for parameter in replica.model.parameters()]


def wrapped(case):
    """Train under a wrapper with these options; return the weights, and how often something that reduces was made."""
    case = dict(case)
    wraps, hook = case.pop("wraps", "before"), case.pop("hook", None)
    replica = Replica(micro=case.pop("micro", 1), to_none=case.pop("to_none", True))
    num_made, make = [], egeria.parallel.strategies._make_reducer
    egeria.parallel.strategies._make_reducer = lambda wrapper: (num_made.append(1), make(wrapper))
    options = {"broadcast_buffers": False, **case}
    try:
        called = DistributedDataParallel(replica.model, **options) if wraps == "before" else None
        if hook is not None:
            called.register_comm_hook(*hook())
        directory = "journal" if distributed.get_rank() == 0 else None
        several = {} if called else {"parallel": Replicas(**options)}
        given = called or replica.model
        run = attach(given, replica.optimizer, **static("0.05:1/8,2/4,3/2", directory=directory), **several)
        called = called or (DistributedDataParallel(replica.model, **options) if wraps == "later" else run.model)
        for _ in range(24):
            loss = replica.backward(called)
            replica.update()
            run.step(loss)
        periods = run.periods
        run.close()
    finally:
        egeria.parallel.strategies._make_reducer = make
    declined = [event.what for event in read_journal(directory).of(Declined)] if directory else []
    return [parameter.detach().clone() for parameter in replica.model.parameters()], len(num_made), periods, declined


def power_sgd():
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=5), powerSGD_hook.powerSGD_hook


def plain_hook():
    return None, default_hooks.allreduce_hook


CASES = [
    (),
    (("gradient_as_bucket_view", True),),
    (("gradient_as_bucket_view", True), ("to_none", False)),
    (("to_none", False),),
    (("find_unused_parameters", True),),
    (("micro", 3),),
    (("hook", plain_hook),),
    (("bucket_cap_mb", 0.0001),),
    (("wraps", "later"),),
    (("wraps", "by us"),),
]


def both(case):
    options = {name: value for name, value in case if name in ("micro", "to_none")}
    return by_hand(24, **options), *wrapped(case)


def test_a_step_picks_what_reduces_its_gradients_whatever_the_wrapper_was_built_with():
    for case, answers in run_cases(both, CASES).items():
        for expected, found, num_made, periods, _ in answers:
            assert periods[:3] == (8, 4, 2), case
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), case
            # What looks for unused parameters cannot be kept: it takes those used at other steps for used.
            assert num_made <= 3 or "find_unused_parameters" in dict(case), f"{case}: made anew at a step"


def test_power_sgd_keeps_every_layer_module_in_every_step():
    for _, _, periods, declined in run_ranks(wrapped, (("hook", power_sgd),)):
        assert set(periods) == {1}
        assert not declined or declined == ["updating front layer modules at some steps only"]


def resumed_in_the_midst_of_a_cycle(wraps):
    """Stop after 11 steps, of which the next rests; go on in a model that is wrapped then, or before."""

    def begin():
        replica = Replica()
        several = {"parallel": Replicas(broadcast_buffers=False)} if wraps == "by us" else {}
        called = DistributedDataParallel(replica.model, broadcast_buffers=False) if wraps == "before" else None
        run = attach(called or replica.model, replica.optimizer, **static("0.05:1/8,2/4,3/2"), **several)
        return replica, called or run.model, run

    def go(replica, called, run, steps):
        for _ in range(steps):
            loss = replica.backward(called)
            replica.update()
            run.step(loss)

    replica, called, run = begin()
    go(replica, called, run, 11)
    saved = [copy.deepcopy(part.state_dict()) for part in (replica.model, replica.optimizer, run)]
    data = replica.data.get_state()
    run.close()
    replica, called, run = begin()
    for part, state in zip((replica.model, replica.optimizer, run), saved, strict=True):
        part.load_state_dict(state)
    replica.data.set_state(data)
    if wraps == "later":
        called = DistributedDataParallel(replica.model, broadcast_buffers=False)
    go(replica, called, run, 13)
    run.close()
    return by_hand(24), [parameter.detach().clone() for parameter in replica.model.parameters()]


def test_law_5_in_the_midst_of_a_cycle_with_two_ranks():
    for case, answers in run_cases(resumed_in_the_midst_of_a_cycle, ["before", "later", "by us"]).items():
        for expected, found in answers:
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), case


def overruled():
    replica = Replica()
    called = DistributedDataParallel(replica.model, broadcast_buffers=False)
    run = attach(called, replica.optimizer, **static("0.05:1/8,2/4,3/2"))
    for step in range(1, 14):
        if step == 7:
            replica.model.requires_grad_(True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EgeriaWarning)
            loss = replica.backward(called)
            gradients = [parameter.grad is not None for parameter in replica.model.parameters()]
            replica.update()
            run.step(loss)
        assert step < 9 or all(gradients), "the loop has the last word from the end of the interval on"
    found = run.periods, run.frozen
    run.close()
    return found, [parameter.detach().clone() for parameter in replica.model.parameters()]


def test_a_loop_that_switches_gradients_on_has_the_last_word():
    (first, weights), (second, others) = run_ranks(overruled)
    assert first == second and set(first[0]) == {1}
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))


# --- parameters in parts ------------------------------------------------------------------------


def train_in_parts(name, folder):
    specimen = SPECIMENS[name]
    if distributed.get_world_size() > 1:
        specimen = sharded(specimen)
    loop = Loop(specimen, attached(Path(folder, name), SCHEDULE))
    course = []
    for _ in range(28):
        loop.step()
        course.append((loop.run.frozen, loop.run.periods))
        with torch.no_grad():
            loop.model.eval()(*specimen.example(torch.Generator())[0], **specimen.example(torch.Generator())[1])
    loop.run.close()
    return course, whole(loop.everything())


IN_PARTS = [name for name in SUPPORTED_NAMES if name not in NOT_SHARDED.keys() | ROUNDED]


@pytest.mark.parametrize("name", each_third(IN_PARTS, always=AS_ONE))
def test_two_ranks_that_share_the_parameters_train_like_one(name, tmp_path):
    two = run_ranks(train_in_parts, name, str(tmp_path / "two"))
    [(course, end)] = run_ranks(train_in_parts, name, str(tmp_path / "one"), num_ranks=1)
    for also, parts_end in two:
        assert also == course
        assert differences(parts_end, end) == []
    assert not read_journal(tmp_path / "two" / name).of(FaultCaught)
