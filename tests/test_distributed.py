"""Two ranks: what they agree on, and freezing under DistributedDataParallel and fully_shard.

The yardstick is a loop that freezes by hand and wraps the model again at each change.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from datetime import timedelta

import psutil
import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from egeria.distributed import ddp, fsdp2, ranks
from laws.ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pair():
    """Two processes of one gloo group, for all jobs of this file."""
    processes = Ranks()
    yield processes
    processes.close()


# --- what ranks agree on --------------------------------------------------------------------------


def fails(what):
    """Return how an exchange ends on this rank when rank 1 fails in it or has failed before it."""
    faults = {
        "work": lambda: 1 / 0,
        "result": lambda: lambda: "cannot be pickled",
        "nowhere": lambda: "fine",
    }
    is_second = ranks.rank() == 1
    try:
        answer = ranks.together(faults[what] if is_second else lambda: "fine")
    except ranks.RankError as error:
        answer = str(error)
    return answer, ranks.exchange(ranks.rank())


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("nowhere", ["fine", "fine"]),
        ("work", "rank 1: ZeroDivisionError: division by zero"),
        ("result", "rank 1: "),
    ],
)
def test_a_fault_of_one_rank_is_raised_on_all_in_the_same_exchange(what, expected, pair):
    for answer, after in pair.run(fails, what):
        assert answer[: len(expected)] == expected
        assert after == [0, 1], "the ranks are not in step any more"


def test_a_process_alone_agrees_with_itself():
    assert (ranks.rank(), ranks.world_size(), ranks.exchange("value")) == (0, 1, ["value"])
    assert ranks.together(lambda: fails) == [fails]
    with pytest.raises(ZeroDivisionError):
        ranks.together(lambda: 1 / 0)


def waits_in_vain(backend):
    """Set up a group of its own and return how an exchange that rank 1 does not take part in ends."""
    world = distributed.group.WORLD
    store = distributed.PrefixStore(backend, distributed.distributed_c10d._world.pg_map[world][1])
    rank = distributed.get_rank()
    distributed.destroy_process_group()
    distributed.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=3))
    together = [ranks.exchange(rank), ranks.together(lambda: rank)]
    began = time.monotonic()
    try:
        if rank == 0:
            ranks.exchange("is anybody there")
    except ranks.LostError as error:
        return together, str(error), time.monotonic() - began
    time.sleep(4)
    return together, "", 0.0


@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"])  # the latter has nothing for the CPU, as NCCL has not
def test_nobody_waits_longer_than_the_timeout_of_the_group(backend):
    processes = Ranks()
    (first, message, seconds), (second, *_) = processes.run(waits_in_vain, backend)
    processes.close()
    assert first == second == [[0, 1], [0, 1]]
    assert message.startswith("the ranks could not reach each other") and seconds < 10


# --- DistributedDataParallel ----------------------------------------------------------------------

DEPTHS = {3: 2, 6: 0, 9: 3, 12: 1}
"""The depth from a step on; the loop begins with nothing frozen."""
STEPS = 16


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.norm, self.adapter = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x, has_adapter=True):
        x = torch.tanh(x + self.norm(self.linear(x)))
        return torch.tanh(x + self.adapter(x)) if has_adapter else x


class Net(nn.Module):
    """Four blocks and a head; some batches leave out the adapters."""

    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 3)

    def forward(self, x, has_adapter=True):
        for block in self.blocks:
            x = block(x, has_adapter)
        return self.head(x)


class Container(nn.Module):
    """Holds the model as a framework does, with a part of its own in front of it."""

    def __init__(self, model):
        super().__init__()
        torch.manual_seed(5)
        self.stem, self.inner = nn.Linear(16, 16), model

    def forward(self, x, *args):
        return self.inner(self.stem(x), *args)


def count_bytes(sizes, bucket):
    sizes.append(bucket.buffer().numel() * bucket.buffer().element_size())
    return default_hooks.allreduce_hook(None, bucket)


def freeze(model, depth):
    """Freeze the first blocks by hand, and no others."""
    for index, block in enumerate(model.blocks):
        block.requires_grad_(index >= depth)
        block.train(index >= depth)
        if index < depth:
            block.zero_grad()


class Loop:
    """Trains a model in two ranks, and lets the wrapper follow what is frozen in one of two ways."""

    def __init__(self, *, again, hook=None, micro_batches=1, unused=False, around=None, compiles=False, **options):
        torch.manual_seed(0)
        self.model, self.again, self.hook, self.options = Net(), again, hook, options
        self.micro_batches, self.unused, self.compiles = micro_batches, unused, compiles
        self.wrapped = Container(self.model) if around else self.model
        self.wrapper = self.wrap()
        self.optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=0.05, momentum=0.9)
        self.depth, self.trained_bytes, self.reduced_bytes = 0, [], []

    def wrap(self):
        wrapper = DistributedDataParallel(self.wrapped, **self.options)
        if self.compiles:
            torch.compiler.reset()
            return torch.compile(wrapper, backend="aot_eager")
        if self.hook == "bytes":
            self.sizes = []
            wrapper.register_comm_hook(self.sizes, count_bytes)
        elif self.hook == "fp16":
            wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return wrapper

    def freeze_to(self, depth):
        self.depth = depth
        freeze(self.model, depth)
        if self.again == "wrapped":
            del self.wrapper
            self.wrapper = self.wrap()
        elif self.again == "rebuilt":
            ddp.rebuild_buckets(ddp.find_wrapper(self.wrapper))

    def train(self, first, last, depths=DEPTHS):
        for step in range(first, last):
            if step in depths:
                self.freeze_to(depths[step])
            self.wrapper.train()
            for block in self.model.blocks[: self.depth]:
                block.eval()
            self.step(step)

    def step(self, step):
        if self.hook == "bytes":
            self.sizes.clear()
        generator = torch.Generator().manual_seed(2 * step + distributed.get_rank())
        for index in range(self.micro_batches):
            has_adapter = not (self.unused and (step + distributed.get_rank()) % 3 == 0)
            is_last = index == self.micro_batches - 1
            with contextlib.nullcontext() if is_last else self.wrapper.no_sync():
                self.wrapper(torch.randn(6, 16, generator=generator), has_adapter).square().mean().backward()
        if self.hook == "bytes":
            self.reduced_bytes.append(sum(self.sizes))
            self.trained_bytes.append(sum(4 * p.numel() for p in self.model.parameters() if p.requires_grad))
        assert all(p.grad is None for p in self.model.parameters() if not p.requires_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.wrapped.state_dict().items()}


def is_equal(first, second):
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def trained_parameters_agree(loop):
    values = torch.cat([p.detach().flatten() for p in loop.wrapped.parameters()])
    found = [torch.empty_like(values) for _ in range(2)]
    distributed.all_gather(found, values)
    return torch.equal(*found)


WAYS = {
    "plain": {},
    "unused parameters": {"find_unused_parameters": True, "unused": True},
    "bucket views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
    "micro-batches": {"micro_batches": 3, "gradient_as_bucket_view": True},
    "fp16 hook": {"hook": "fp16"},
    "counted bytes": {"hook": "bytes", "bucket_cap_mb": 0.001},
    "own buffers": {"broadcast_buffers": False},
    "container": {"around": True},
    "compiled": {"compiles": True},
}


def both_ways(options):
    warnings.simplefilter("ignore")  # broadcast_buffers is deprecated, and used
    by_hand, rebuilt = (Loop(again=again, **options) for again in ("wrapped", "rebuilt"))
    for loop in (by_hand, rebuilt):
        loop.train(0, STEPS)
    return (
        is_equal(by_hand.weights(), rebuilt.weights()),
        trained_parameters_agree(rebuilt),
        rebuilt.reduced_bytes == rebuilt.trained_bytes == by_hand.trained_bytes,
        len(set(rebuilt.trained_bytes)),
    )


@pytest.mark.parametrize("way", [*list(WAYS)[:-1], pytest.param("compiled", marks=pytest.mark.slow)])
def test_buckets_that_are_rebuilt_train_as_a_model_that_is_wrapped_again(way, pair):
    for equal, agree, reduces_what_trains, num_depths in pair.run(both_ways, WAYS[way]):
        assert equal and agree and reduces_what_trains
        assert way != "counted bytes" or num_depths == 4


def resumes(where, has_eval_pass, no_sync):
    """Return whether a run resumed with a frozen front equals the uninterrupted one.

    Its wrapper is made before the front is frozen, or after, and found in the first forward pass.
    """
    options = {"around": where == "container", "micro_batches": 2 if no_sync else 1}
    whole = Loop(again="rebuilt", **options)
    whole.train(0, 4)
    saved = copy.deepcopy((whole.wrapped.state_dict(), whole.optimizer.state_dict()))
    whole.train(4, STEPS)
    resumed, found = Loop(again="found", **options), []
    resumed.wrapped.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    resumed.freeze_to(DEPTHS[3])
    if where == "after":
        resumed.wrapper = resumed.wrap()

    def look(model, _args):
        found.append(ddp.find_wrapper(model))
        ddp.rebuild_buckets(found[0])
        handle.remove()

    handle = resumed.model.register_forward_pre_hook(look)
    if has_eval_pass:
        resumed.wrapper.eval()
        with torch.no_grad():
            resumed.wrapper(torch.zeros(2, 16))
    resumed.train(4, 6)
    resumed.again = "rebuilt"
    resumed.train(6, STEPS)
    return is_equal(whole.weights(), resumed.weights()), found[0] is resumed.wrapper


@pytest.mark.parametrize("where", ["before", "after", "container"])
@pytest.mark.parametrize(("has_eval_pass", "no_sync"), [(False, False), (True, False), (False, True)])
def test_a_resumed_run_finds_its_wrapper_in_the_first_forward_pass(where, has_eval_pass, no_sync, pair):
    for equal, is_found in pair.run(resumes, where, has_eval_pass, no_sync):
        assert equal and is_found


def finds():
    model, other = Net(), nn.Linear(16, 16)
    wrapper, seen = DistributedDataParallel(model), []
    model.register_forward_pre_hook(lambda *_: seen.append((ddp.find_wrapper(model), ddp.find_wrapper(other))))
    wrapper(torch.zeros(2, 16))
    around = DistributedDataParallel(Container(Net()))
    compiled = torch.compile(wrapper)
    return (
        seen == [(wrapper, None)],
        ddp.find_wrapper(model) is None and ddp.find_wrapper(wrapper) is wrapper is ddp.find_wrapper(compiled),
        ddp.unwrap(compiled) is model and ddp.unwrap(DistributedDataParallel(torch.compile(model))) is model,
        isinstance(ddp.unwrap(around), Container),
    )


def test_the_wrapper_is_the_one_given_or_the_one_around_the_model(pair):
    assert pair.run(finds) == [(True,) * 4] * 2


def hundred_cycles():
    torch.manual_seed(0)
    model = Net(width=256)
    wrapper = DistributedDataParallel(model, bucket_cap_mb=64)
    wrapper.register_comm_hook([], count_bytes)
    before = list(wrapper._comm_hooks)
    optimizer, memory = torch.optim.SGD(model.parameters(), lr=0.01), []
    for cycle in range(100):
        freeze(model, cycle % 4)
        ddp.rebuild_buckets(wrapper)
        wrapper(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        memory.append(psutil.Process().memory_info().rss)
    bucket_bytes = sum(4 * p.numel() for p in model.parameters())
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    return wrapper._comm_hooks == before, (memory[99] - memory[21]) / bucket_bytes, values


def test_a_hundred_rebuilds_leave_no_memory_and_keep_the_hook(pair):
    first, second = pair.run(hundred_cycles)
    for keeps_hook, growth, values in (first, second):
        assert keeps_hook
        assert growth < 8, f"grew by {growth:.1f} sets of buckets in 78 rebuilds; a leak is one in each"
        assert torch.equal(values, first[2]) and values.isfinite().all()


# --- what is refused of DistributedDataParallel ---------------------------------------------------


def refusals():
    found = {"bare": ddp.refuse(None), "plain": ddp.refuse(DistributedDataParallel(Net()))}
    found["static_graph"] = ddp.refuse(DistributedDataParallel(Net(), static_graph=True))
    builtin = DistributedDataParallel(Net())
    builtin._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)
    found["builtin hook"] = ddp.refuse(builtin)
    compressed = DistributedDataParallel(Net())
    compressed.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    found["powersgd"] = ddp.refuse(compressed)
    model = Net()
    delayed = DistributedDataParallel(
        model,
        delay_all_reduce_named_params=[("head.weight", model.head.weight)],
        param_to_hook_all_reduce=model.head.bias,
    )
    found["delayed"] = ddp.refuse(delayed)
    overlapped = DistributedDataParallel(Net())
    overlapped._register_fused_optim(torch.optim.SGD, 0.1)
    found["overlapped"] = ddp.refuse(overlapped)
    groups = [distributed.new_group([rank]) for rank in range(2)]
    found["part"] = ddp.refuse(DistributedDataParallel(Net(), process_group=groups[distributed.get_rank()]))
    joined = DistributedDataParallel(Net())
    with joined.join():
        found["join"] = ddp.refuse(joined)
        try:
            ddp.check_not_joined(joined)
        except ranks.LostError as error:
            found["joined later"] = str(error)
        for _ in range(2 + distributed.get_rank()):
            joined(torch.randn(4, 16)).sum().backward()
    ddp.check_not_joined(overlapped)
    ddp.check_not_joined(None)
    return found


REFUSED = {
    "bare": "called without DistributedDataParallel",
    "static_graph": "static_graph=True",
    "builtin hook": "register_comm_hook",
    "powersgd": "PowerSGD",
    "delayed": "delay_all_reduce_named_params",
    "overlapped": "steps within the backward pass",
    "part": "some processes of the job only",
    "join": "`join()`",
    "joined later": "`join()`",
}


def test_a_wrapper_that_cannot_follow_is_refused_with_the_reason(pair):
    for found in pair.run(refusals):
        assert found.pop("plain") is None
        assert set(found) == set(REFUSED)
        for name, part in REFUSED.items():
            assert part in found[name], name


# --- fully_shard ----------------------------------------------------------------------------------


def encoder(depth=5):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(depth)])


def shard(model, **options):
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    for part in model:
        fully_shard(part, **options)
    return fully_shard(model, **options)


def train_shards(is_sharded, compiles):
    """Train on the batches of both ranks, in parts or whole in each, with an evaluation in between."""
    model = encoder()
    if compiles:
        for part in model:
            part.compile(backend="aot_eager")
    if is_sharded:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for step in range(STEPS):
        if step in (5, 11):
            with torch.no_grad():
                model(torch.zeros(2, 8))  # leaves the parameters of the root whole
        if step in DEPTHS:
            fsdp2.reshard(model)
            for index, part in enumerate(model):
                part.requires_grad_(index >= DEPTHS[step])
            fsdp2.prepare_units(model)
        batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank)) for rank in range(2)]
        batch = batches[distributed.get_rank()] if is_sharded else torch.cat(batches)
        model(batch).square().mean().backward()
        found.append([p.grad is not None for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if is_sharded else p.detach() for p in model.parameters()], found


def shards_and_whole(compiles):
    (parts, in_parts), (whole, in_whole) = (train_shards(is_sharded, compiles) for is_sharded in (True, False))
    return all(torch.allclose(*both, rtol=1e-4, atol=1e-6) for both in zip(parts, whole, strict=True)), (
        in_parts == in_whole
    )


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_sharded_model_freezes_and_thaws_as_a_whole_one(compiles, pair):
    assert pair.run(shards_and_whole, compiles) == [(True, True)] * 2


def thaw_after_a_resume():
    """Freeze before the first forward pass of a model that computes in bfloat16, as a resumed run does, then thaw."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: PLC0415

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(encoder(), mp_policy=policy)
    model[:2].requires_grad_(False)
    fsdp2.prepare_units(model)
    model(torch.ones(4, 8)).float().square().mean().backward()
    model.requires_grad_(True)
    fsdp2.prepare_units(model)
    model(torch.ones(4, 8)).float().square().mean().backward()
    return {str(p.grad.dtype) for p in model.parameters()}


def test_what_thaws_after_a_resume_has_gradients_in_its_own_dtype(pair):
    assert pair.run(thaw_after_a_resume) == [{"torch.float32"}] * 2
    assert not fsdp2.is_sharded(encoder())


def sharded_otherwise():
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor import distribute_module  # noqa: PLC0415
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    tensors = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    twice = encoder()
    parallelize_module(twice[0][0], tensors["tensor"], ColwiseParallel())
    found = {
        "plain": shard(encoder()),
        "part": shard(encoder(), mesh=mesh["shard"]),
        "replicated": shard(encoder(), mesh=mesh),
        "tensors": distribute_module(encoder(), init_device_mesh("cpu", (2,))),
        "twice": fully_shard(twice, mesh=tensors["data"]),
    }
    assert all(map(fsdp2.is_sharded, found.values()))
    return {name: fsdp2.refuse(model) for name, model in found.items()}


def test_other_ways_of_sharding_are_refused_with_the_reason(pair):
    for found in pair.run(sharded_otherwise):
        assert found["plain"] is None and found["replicated"] is None
        assert "some processes of the job only" in found["part"]
        assert "fully_shard did not make" in found["tensors"]
        assert "split twice" in found["twice"]
