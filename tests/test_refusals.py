"""Ways of training in several processes that cannot be frozen: each is recognised, and told with a way out."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import egeria
from egeria.testing import ScriptedController
from loops import FAST
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)])


class Checkpointed(nn.Module):
    """Recomputes its front in the backward pass, reentrantly."""

    def __init__(self):
        super().__init__()
        self.parts = model()

    def forward(self, x):
        x = checkpoint(self.parts[:2], x.requires_grad_(), use_reentrant=True)
        return self.parts[2:](x)


class DeepSpeedEngine(nn.Module):
    """Stands for the wrapper of that library, by its name."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def fsdp1(bare):
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415

    return FullyShardedDataParallel(bare, use_orig_params=True, device_id=torch.device("cpu"))


def compiled_shards(bare):
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    for part in bare:
        fully_shard(part)
    bare[0].compile(backend="eager")
    return fully_shard(bare)


def in_tensors_of_its_own(bare):
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor import distribute_module  # noqa: PLC0415

    return distribute_module(bare, init_device_mesh("cpu", (2,)))


def split_twice(bare):
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: PLC0415

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(bare[0][0], mesh["tensor"], ColwiseParallel())
    return fully_shard(bare, mesh=mesh["data"])


def in_partitions(bare):
    for parameter in bare.parameters():
        parameter.ds_id = 1  # how ZeRO marks what it has partitioned
    return DistributedDataParallel(bare)


def stepping_early(bare):
    from torch.distributed.optim import _apply_optimizer_in_backward  # noqa: PLC0415

    _apply_optimizer_in_backward(torch.optim.SGD, bare.parameters(), {"lr": 0.1})
    return DistributedDataParallel(bare)


def with_builtin_hook(bare):
    wrapper = DistributedDataParallel(bare)
    wrapper._register_builtin_comm_hook(distributed.BuiltinCommHookType.ALLREDUCE)
    return wrapper


WAYS = {
    "static_graph": (lambda bare: DistributedDataParallel(bare, static_graph=True), "Build it without static_graph"),
    "deepspeed": (DeepSpeedEngine, "Use fully_shard"),
    "zero3": (in_partitions, "ZeRO.*Use fully_shard"),
    "fsdp1": (fsdp1, "FSDP1.*Use fully_shard"),
    "compiled_shards": (compiled_shards, "sharded and compiled.*use DistributedDataParallel"),
    "dtensors": (in_tensors_of_its_own, "DTensors that fully_shard did not make.*fully_shard alone"),
    "split_twice": (split_twice, "split twice.*fully_shard alone"),
    "data_parallel": (nn.DataParallel, "one process for each device"),
    "steps_in_backward": (stepping_early, r"Call optimizer.step\(\)"),
    "builtin_hook": (with_builtin_hook, "register_comm_hook"),
}
CANNOT_TRAIN = {"steps_in_backward", "dtensors", "split_twice"}
"""Torch itself cannot go on with these here: on a CPU, or with batches that are plain tensors."""


def train(way):
    """Return what was said, how far training came, and what froze."""
    steps = 0 if way in CANNOT_TRAIN else 24
    wrapped = WAYS[way][0](model()) if way in WAYS else DistributedDataParallel(Checkpointed())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    rank = distributed.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = egeria.attach(wrapped, optimizer, config=FAST, controller=ScriptedController(), directory=f"{way}{rank}")
        losses = []
        for step in range(steps):
            loss = wrapped(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
            losses.append(float(loss))
        frozen = run.frozen
        run.close()
    said = [str(entry.message) for entry in caught if issubclass(entry.category, egeria.EgeriaWarning)]
    return said, losses, frozen


@pytest.mark.parametrize("way", [*WAYS, "reentrant"])
def test_it_is_refused_with_the_reason_and_the_alternative(way):
    expected = WAYS[way][1] if way in WAYS else "use_reentrant=False"
    said, losses, frozen = run_ranks(train, way)[0]
    assert frozen == 0 and (len(losses) == 24 or way in CANNOT_TRAIN)
    refusals = [message for message in said if message.startswith("egeria: freezing")]
    assert len(refusals) == 1
    assert re.search(expected, refusals[0])
