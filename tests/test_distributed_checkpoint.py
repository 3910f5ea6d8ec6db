"""Saving and loading with `torch.distributed.checkpoint`: the run goes on as if it had never stopped."""

import dataclasses
from pathlib import Path

import pytest
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from egeria import read_journal
from egeria.events import FaultCaught, ModuleFrozen, PlasticityRead
from loops import FAST, Loop, differences
from menagerie import SPECIMENS
from ranks import replica, run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
CONFIG = {**FAST, "freezing": {"tolerance_share": 3.0}}
STEPS = 24
OF_PARTS = {"plan": "0.2:1 0.7:2", "total_steps": 2 * STEPS, "config": {"plasticity": {"interval_steps": 2}}}


def shard(model):
    """Shard each part that has weights, and the model around them."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - it takes seconds

    for part in model.children():
        if any(True for _ in part.parameters()) and not isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            fully_shard(part)
    return fully_shard(model)


def whole(state):
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}


def begin(name, folder, *, in_parts=False, seed=0):
    specimen = SPECIMENS[name]
    attach = {"directory": Path(folder), **(OF_PARTS if in_parts else {"config": CONFIG, "controller": "inline"})}
    if in_parts:
        specimen = dataclasses.replace(specimen, build=lambda: shard(SPECIMENS[name].build()))
        return Loop(specimen, attach, seed=seed)
    return Loop(specimen, attach, seed=seed, wrap=replica)


def save(loop, path, **options):
    model, optimizer = get_state_dict(loop.model, loop.optimizer)
    state = {"model": model, "optimizer": optimizer, "run": loop.run.packed}
    dcp.save(state, checkpoint_id=path, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True), **options)
    return loop.data.get_state(), loop.random, list(loop.losses)


def load(loop, path, rest, **options):
    model, optimizer = get_state_dict(loop.model, loop.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path, **options)
    set_state_dict(loop.model, loop.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    dcp.load({"run": loop.run.packed}, checkpoint_id=path, **options)  # last, as ever
    loop.data.set_state(rest[0])
    loop.random, loop.losses = rest[1], list(rest[2])


def in_two_pieces(name, folder, in_parts):
    """Train in two ranks, save, go on; and once more from the checkpoint."""
    first = begin(name, Path(folder, "whole"), in_parts=in_parts)
    first.step(STEPS)
    path = str(Path(folder, "checkpoint"))
    rest = save(first, path)
    depth = first.run.frozen
    second = begin(name, Path(folder, "resumed"), in_parts=in_parts, seed=9)
    load(second, path, rest)
    at_once = second.run.frozen
    for loop in (first, second):
        loop.step(STEPS)
    ends = [whole(loop.everything()) for loop in (first, second)]
    depths = [loop.run.frozen for loop in (first, second)]
    for loop in (first, second):
        loop.run.close()
    return rest, depth, at_once, depths, ends


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def replicas(folder):
    return run_ranks(in_two_pieces, "residual", str(folder / "replicas"), False)


@pytest.fixture(scope="module")
def parts(folder):
    return run_ranks(in_two_pieces, "residual", str(folder / "parts"), True)


def decided(folder, after):
    journal = read_journal(folder)
    events = [*journal.of(PlasticityRead), *journal.of(ModuleFrozen)]
    return [(e.kind, e.step, e.module, getattr(e, "value", 0.0)) for e in events if e.step > after]


def test_two_ranks_go_on_as_if_they_had_never_stopped(replicas, folder):
    for _, depth, at_once, depths, ends in replicas:
        assert depth == at_once > 0 and depths[0] == depths[1] > depth
        assert differences(ends[0], ends[1]) == []
    paths = [folder / "replicas" / name for name in ("whole", "resumed")]
    assert decided(paths[0], STEPS) == decided(paths[1], STEPS)
    assert not read_journal(paths[1]).of(FaultCaught)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_goes_on_where_two_have_stopped(replicas, folder):
    rest, depth, _, depths, ends = replicas[0]
    alone = begin("residual", folder / "alone", seed=9)
    load(alone, str(folder / "replicas" / "checkpoint"), rest, no_dist=True)
    assert alone.run.frozen == depth
    alone.step(STEPS)
    assert alone.run.frozen == depths[0]
    assert differences(alone.everything(), ends[0]) == []
    alone.run.close()


def test_models_in_parts_go_on_as_if_they_had_never_stopped(parts, folder):
    for _, depth, at_once, depths, ends in parts:
        assert depth == at_once == 1 and depths == [2, 2]
        assert differences(ends[0], ends[1]) == []
    assert not read_journal(folder / "parts" / "resumed").of(FaultCaught)
