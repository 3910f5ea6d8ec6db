"""Two ranks: what they agree on, what is rebuilt at each change of depth, and what is refused."""

import time
from datetime import timedelta

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from egeria.distributed import ddp, fsdp2, ranks
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


# --- what ranks agree on --------------------------------------------------------------------------


FAILS = {
    "nowhere": (lambda: "fine", ["fine", "fine"]),
    "work": (lambda: 1 / 0, "rank 1: ZeroDivisionError: division by zero"),
    "result": (lambda: lambda: "cannot be pickled", "rank 1: "),
}


def fail():
    """Return how exchanges end on this rank where rank 1 fails in them."""
    found, is_second = [], ranks.rank() == 1
    for work, _ in FAILS.values():
        try:
            answer = ranks.together(work if is_second else lambda: "fine")
        except ranks.RankError as error:
            answer = str(error)
        found.append((answer, ranks.exchange(ranks.rank())))
    return found


def test_a_fault_of_one_rank_is_raised_on_all_in_the_same_exchange():
    for found in run_ranks(fail):
        for (answer, after), (_, expected) in zip(found, FAILS.values(), strict=True):
            assert answer[: len(expected)] == expected
            assert after == [0, 1], "the ranks are not in step any more"


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


def test_nobody_waits_longer_than_the_timeout_of_the_group():
    # This backend has nothing for the CPU, as NCCL has not.
    (first, message, seconds), (second, *_) = run_ranks(waits_in_vain, "cuda:gloo")
    assert first == second == [[0, 1], [0, 1]]
    assert message.startswith("the ranks could not reach each other") and seconds < 10


# --- DistributedDataParallel ----------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.blocks(x))


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
    return found


REFUSED = {
    "bare": "called without DistributedDataParallel",
    "static_graph": "static_graph=True",
    "builtin hook": "register_comm_hook",
    "powersgd": "PowerSGD",
    "delayed": "delay_all_reduce_named_params",
    "overlapped": "steps within the backward pass",
    "part": "some ranks of the job only",
}


def test_a_wrapper_that_cannot_follow_is_refused_with_the_reason():
    for found in run_ranks(refusals):
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


def test_what_thaws_after_a_resume_has_gradients_in_its_own_dtype():
    assert run_ranks(thaw_after_a_resume) == [{"torch.float32"}] * 2


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


def test_other_ways_of_sharding_are_refused_with_the_reason():
    for found in run_ranks(sharded_otherwise):
        assert found["plain"] is None and found["replicated"] is None
        assert "some ranks of the job only" in found["part"]
        assert "fully_shard did not make" in found["tensors"]
        assert "split twice" in found["twice"]
