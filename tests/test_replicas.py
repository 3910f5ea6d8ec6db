"""Replicas under DistributedDataParallel: what is frozen is not reduced, and everything else stays as it was."""

from __future__ import annotations

import copy
import functools

import psutil
import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import egeria
from egeria.layers.freezing import Freezer
from egeria.layers.modules import parse_modules
from egeria.parallel import Replicas, choose_parallel
from egeria.testing import ScriptedController
from loops import FAST
from menagerie import SPECIMENS
from ranks import run_cases, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def count_bytes(sizes, bucket):
    """Reduce as ever, and note how much."""
    sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
    return default_hooks.allreduce_hook(None, bucket)


def wide_model(width=8, depth=5):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*layers)


def batch(step, rank, width):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


class Frozen:
    """A wrapped model whose front is frozen and thawed by hand."""

    def __init__(self, model, **options):
        self.strategy, self.wrapper = Replicas(), DistributedDataParallel(model, **options)
        self.model = self.strategy.take(self.wrapper)
        self.modules = parse_modules(self.model, pattern=r"\d")
        self.freezer = Freezer(self.model, self.modules)

    def freeze_to(self, depth):
        self.freezer.thaw()
        self.freezer.freeze_to(depth)
        names = [name for module in self.modules[:depth] for name in module.submodules]
        self.strategy.update(names)

    def backward(self, step=0, width=8):
        self.model.train()
        self.model.zero_grad()
        self.wrapper(batch(step, distributed.get_rank(), width)).square().mean().backward()


def reduced_bytes():
    frozen = Frozen(wide_model())
    sizes = []
    frozen.wrapper.register_comm_hook(sizes, count_bytes)
    found = []
    for depth in (0, 1, 3, 0, 4):
        frozen.freeze_to(depth)
        for step in range(3):
            sizes.clear()
            frozen.backward(step)
            trained = sum(p.numel() * p.element_size() for p in frozen.model.parameters() if p.requires_grad)
            found.append((depth, sum(sizes), trained))
    return found


def test_bytes_reduced_are_the_trainable_bytes_at_each_depth():
    for found in run_ranks(reduced_bytes):
        assert [entry for entry in found if entry[1] != entry[2]] == []
        assert len({size for _, size, _ in found}) == 4


def hundred_cycles(hook):
    width = 256
    # In one bucket: with two, PowerSGD on gloo mixes up the ranks' messages, with nothing frozen too.
    frozen = Frozen(wide_model(width, depth=6), bucket_cap_mb=64)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        frozen.wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "fp16":  # its twin in bf16 needs NCCL
        frozen.wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
    alone = copy.deepcopy(frozen.model) if distributed.get_rank() == 0 else None
    optimizer = torch.optim.SGD(frozen.model.parameters(), lr=0.05, momentum=0.9)
    errors, memory = [], []
    for cycle in range(100):
        depth = cycle % 6
        frozen.freeze_to(depth)
        for step in range(4 if hook == "powersgd" else 1):
            frozen.backward(10 * cycle + step, width)
            if alone is not None:
                errors.append(gradient_error(frozen.model, alone, 10 * cycle + step, width, depth))
            optimizer.step()
        memory.append(psutil.Process().memory_info().rss)
    hooks = {len(p._post_accumulate_grad_hooks or ()) for p in frozen.model.parameters()}
    weights = [parameter.detach().clone() for parameter in frozen.model.parameters()]
    bucket_bytes = sum(p.numel() * 4 for p in frozen.model.parameters())
    return max(errors, default=0.0), (memory[99] - memory[21]) / bucket_bytes, hooks, weights


def gradient_error(model, alone, step, width, depth):
    """Return how far gradients are from the mean of both ranks' own, computed in one process."""
    alone.load_state_dict(model.state_dict())
    alone.train()
    for module in list(alone)[:depth]:
        module.eval()
    alone.zero_grad()
    losses = [alone(batch(step, rank, width)).square().mean() for rank in range(2)]
    torch.stack(losses).mean().backward()
    pairs = [pair for pair in zip(model.parameters(), alone.parameters(), strict=True) if pair[0].requires_grad]
    largest = max(theirs.grad.abs().max() for _, theirs in pairs)
    found = [(ours.grad - theirs.grad).abs().max() / largest for ours, theirs in pairs]
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    return float(torch.stack(found).max())


@pytest.mark.parametrize(
    ("hook", "tolerance"), [("none", 1e-4), ("fp16", 2e-2), pytest.param("powersgd", None, marks=pytest.mark.slow)]
)
def test_a_hundred_cycles_leave_no_memory_no_hook_and_right_gradients(hook, tolerance):
    first, second = run_ranks(hundred_cycles, hook)
    assert all(torch.equal(*pair) for pair in zip(first[3], second[3], strict=True)), "ranks differ"
    for error, growth, hooks, _ in (first, second):
        assert tolerance is None or error < tolerance
        assert growth < 8, f"grew by {growth:.1f} sets of buckets in 78 cycles; a leak is one in each"
        assert hooks == {0}


def options_after_a_freeze():
    options = {"bucket_cap_mb": 1, "find_unused_parameters": True, "gradient_as_bucket_view": True}
    frozen = Frozen(wide_model(), **options)
    called = []
    frozen.wrapper.register_forward_hook(lambda *_: called.append(1))
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=5)
    frozen.wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    before = {name: getattr(frozen.wrapper, name) for name in ("bucket_bytes_cap", *options) if name != "bucket_cap_mb"}
    frozen.backward()
    with frozen.wrapper.no_sync():
        frozen.backward()
    frozen.freeze_to(2)
    frozen.backward()
    after = {name: getattr(frozen.wrapper, name) for name in before}
    logged = frozen.wrapper._get_ddp_logging_data()["comm_hook"]
    return before == after, frozen.wrapper._comm_hooks == [(powerSGD_hook.powerSGD_hook, state)], len(called), logged


def test_options_hooks_and_identity_stay():
    for same, registered, calls, logged in run_ranks(options_after_a_freeze):
        assert same and registered and calls == 3 and logged == "powerSGD_hook"


def buffers_of_frozen_layers(broadcasts):
    options = {} if broadcasts else {"broadcast_buffers": False}
    if not broadcasts and "forward_sync_buffers" in DistributedDataParallel.__init__.__code__.co_varnames:
        options = {"forward_sync_buffers": False}
    frozen = Frozen(wide_model(), **options)
    for step in range(3):
        frozen.backward(step)
    frozen.freeze_to(2)
    names = sorted(frozen.wrapper.named_module_buffers)
    frozen.backward(9)
    values = [buffer.clone() for layer in list(frozen.model)[:2] for buffer in layer.buffers()]
    frozen.freeze_to(0)
    return names, values, sorted(frozen.wrapper.named_module_buffers)


def test_frozen_buffers_are_equal_and_broadcast_no_more():
    (names, first, thawed), (_, second, _) = run_ranks(buffers_of_frozen_layers, True)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert {name[0] for name in names} == {"2", "3", "4"} and {name[0] for name in thawed} == {"0", "1", "2", "3", "4"}


def test_buffers_that_ranks_keep_for_themselves_stay_their_own():
    (_, first, _), (_, second, _) = run_ranks(buffers_of_frozen_layers, False)
    assert not all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def two_lines(wraps_before):
    specimen = SPECIMENS["residual"]
    torch.manual_seed(distributed.get_rank())  # replicas begin alike all the same
    model = specimen.build()
    called = DistributedDataParallel(model)
    given = called if wraps_before else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(distributed.get_rank())
    directory = "journal" if distributed.get_rank() == 0 else None
    with egeria.attach(given, optimizer, config=FAST, controller=ScriptedController(), directory=directory) as run:
        for _ in range(40):
            args, kwargs = specimen.example(data)
            called.train()
            loss = specimen.loss(called(*args, **kwargs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
        frozen = run.frozen
    trained = all(parameter.requires_grad for parameter in model.parameters())
    return frozen, trained, run.directory


def test_two_lines_train_replicas_whichever_of_wrapper_and_model_is_given():
    for first, second in run_cases(two_lines, [True, False]).values():
        for frozen, trained, _ in (first, second):
            assert frozen == 3 and trained
        assert str(first[-1]) == "journal" and second[-1] is None


def strategies():
    model = wide_model()
    bare, wrapped = choose_parallel(model), choose_parallel(DistributedDataParallel(model))
    return type(bare).__name__, type(wrapped).__name__


def test_the_strategy_is_seen_from_wrapper_and_job():
    assert run_ranks(strategies) == [("Replicas", "Replicas")] * 2
    assert run_ranks(strategies, num_ranks=1) == [("SingleProcess", "Replicas")]


def rates_after(policy, total_steps=60):
    model = wide_model()
    called = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attach = functools.partial(egeria.attach, called, optimizer, policy=policy, total_steps=total_steps)
    with attach(directory="journal" if distributed.get_rank() == 0 else None) as run:
        for step in range(total_steps):
            called.train()
            loss = called(batch(step, distributed.get_rank(), 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
        return run.frozen, [parameter.detach().clone() for parameter in model.parameters()]


def test_a_plan_keeps_ranks_alike():
    found = run_cases(rates_after, ["linear"])
    for (frozen, first), (also, second) in found.values():
        assert frozen == also > 0
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
