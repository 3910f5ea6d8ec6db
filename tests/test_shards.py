"""Models sharded by `fully_shard`: decided, frozen and trained as in one process, over the whole menagerie."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from egeria import attach, read_journal
from egeria.events import FaultCaught, ModuleFrozen, PlasticityRead, StageChanged, Thawed
from egeria.layers.batch import Autocast, Batch
from egeria.layers.freezing import Freezer
from egeria.layers.modules import parse_modules
from egeria.layers.shards import element_shares, gather, is_sharded, outline
from egeria.layers.taps import forward_shares
from egeria.parallel import Sharded, choose_parallel
from egeria.testing import ScriptedController
from loops import FAST, Loop, differences
from menagerie import SPECIMENS, SUPPORTED_NAMES, of_menagerie
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
CONFIG = {
    **FAST,
    "plasticity": {**FAST["plasticity"], "mode": "train"},
    "freezing": {"tolerance_share": 3.0},
}
STEPS = 20


AS_ONE = {"InPlace", "TwoHeads", "stochastic_depth", "Tied"}
"""Models that call the layers within their parts themselves, or share a weight between parts: sharded as one."""
NOT_SHARDED = {"channels_last": "FSDP does not support non-contiguous parameters"}
"""Models that `fully_shard` refuses, with or without egeria."""
ROUNDED = {"Translator"}
"""Models that `fully_shard` trains with other rounding than one process, with or without egeria."""


def shard(model, *, as_one=False):
    """Shard each part that has weights, and the model around them."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    for part in () if as_one else parts_of(model):
        fully_shard(part)
    return fully_shard(model)


def parts_of(model):
    for part in model.children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            yield from parts_of(part)
        elif any(True for _ in part.parameters()):
            yield part


def sharded(specimen):
    return dataclasses.replace(specimen, build=lambda: shard(specimen.build(), as_one=specimen.name in AS_ONE))


def whole(state):
    return {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}


def train(name, folder):
    specimen = SPECIMENS[name]
    if distributed.get_world_size() > 1:
        try:
            Loop(sharded(specimen)).step(2)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        specimen = sharded(specimen)
    loop = Loop(specimen, {"config": CONFIG, "controller": "inline", "directory": Path(folder, name)})
    frozen = []
    for step in range(2 * STEPS):
        if step == STEPS:
            for group in loop.optimizer.param_groups:
                group["lr"] /= 20
        loop.step()
        frozen.append(loop.run.frozen)
    loop.run.close()
    return frozen, whole(loop.everything())


def _is_close(first, second):
    return not isinstance(first, torch.Tensor) or torch.allclose(first, second, rtol=1e-4, atol=1e-6)


def decisions(folder):
    journal = read_journal(folder)
    read = [(e.step, e.evaluation, e.module, e.value) for e in journal.of(PlasticityRead)]
    return [
        *read,
        *[(e.kind, e.step, e.reason) for kind in (StageChanged, ModuleFrozen, Thawed) for e in journal.of(kind)],
    ]


@pytest.mark.parametrize("name", of_menagerie(SUPPORTED_NAMES))
def test_two_ranks_that_share_the_parameters_decide_and_train_like_one(name, tmp_path):
    two = run_ranks(train, name, str(tmp_path / "two"))
    if name in NOT_SHARDED:
        assert all(NOT_SHARDED[name] in found for found in two), "this model can be sharded now"
        pytest.skip(f"fully_shard cannot train it, with or without egeria: {NOT_SHARDED[name]}")
    [(frozen, end)] = run_ranks(train, name, str(tmp_path / "one"), num_ranks=1)
    for also, parts_end in two:
        assert also == frozen
        assert all(_is_close(*pair) for pair in zip(parts_end.values(), end.values(), strict=True))
        assert name in ROUNDED or differences(parts_end, end) == []
    assert name in ROUNDED or decisions(tmp_path / "two" / name) == decisions(tmp_path / "one" / name)
    assert max(frozen) > 0 and read_journal(tmp_path / "one" / name).of(Thawed)
    assert not read_journal(tmp_path / "two" / name).of(FaultCaught)


# --- copies that one process can run ------------------------------------------------------------


def copies():
    plain = encoder()
    model = shard(encoder())
    before = {name: id(entry) for name, entry in model.named_parameters()}
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    autocast = Autocast.current("cpu")
    batch = Batch(args=(x,), kwargs={}, autocast=autocast)
    shares = forward_shares(*_with_modules(*outline(model, batch)))
    plain_shares = forward_shares(plain, parse_modules(plain), batch)
    leads = distributed.get_rank() == 0
    copied = gather(model, keeps=leads)
    outputs = torch.equal(model(x), plain(x))
    same = not leads or (
        torch.equal(copied(x), plain(x))
        and type(copied) is type(plain)
        and differences(copied.state_dict(), plain.state_dict()) == []
        and pickle.loads(pickle.dumps(copied)) is not None
        and not any(module._forward_pre_hooks or module._forward_hooks for module in copied.modules())
    )
    untouched = before == {name: id(entry) for name, entry in model.named_parameters()}
    return same, untouched, shares == pytest.approx(plain_shares), outputs


def _with_modules(model, batch):
    return model, parse_modules(model), batch


def encoder(width=8, depth=5):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers)


def test_copies_are_plain_and_the_model_stays_as_it_is():
    for found in run_ranks(copies):
        assert all(found)


def train_by_plan(folder):
    """Train an encoder by a plan; in parts where there are several processes."""
    model = encoder()
    model = shard(model) if distributed.get_world_size() > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data, frozen = torch.Generator().manual_seed(0), []
    config = {"policy": {"plan": "0.3:1 0.5:3 0.8:2"}, "plasticity": {"interval_steps": 2}}
    run = attach(model, optimizer, total_steps=40, config=config, directory=Path(folder, "plan"))
    for _ in range(40):
        x = torch.randn(16, 8, generator=data)
        model.train()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
        frozen.append(run.frozen)
    run.close()
    return frozen, whole({name: entry.detach() for name, entry in model.named_parameters()})


def test_a_plan_is_followed_in_parts_as_in_one(tmp_path):
    [(frozen, weights)] = run_ranks(train_by_plan, str(tmp_path / "one"), num_ranks=1)
    assert set(frozen) == {0, 1, 2, 3}
    for also, parts_weights in run_ranks(train_by_plan, str(tmp_path / "two")):
        assert also == frozen
        for name, weight in weights.items():
            assert torch.allclose(parts_weights[name], weight, rtol=1e-4, atol=1e-6)
    assert not read_journal(tmp_path / "two" / "plan").of(FaultCaught)


# --- when something goes wrong ------------------------------------------------------------------


def fail(where, folder):
    """Train a sharded encoder while something of ours fails in one process."""
    model = shard(encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    leads = distributed.get_rank() == 0

    def refreshing(_model):
        if where == "refresh":
            raise RuntimeError("injected")

    def reading(evaluation, module):
        if where == "reading" and evaluation > 12:
            raise RuntimeError("injected")
        return 1.0

    controller = ScriptedController(reading, refreshing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = attach(model, optimizer, config=CONFIG, controller=controller, directory=Path(folder, where))
        frozen = []
        for step in range(40):
            if step == 20 and where == "policy" and not leads:
                run._session.parts.policy.observe_interval = None
            if step == 10 and where == "evaluation of the loop":
                model.eval()
                with torch.no_grad():
                    model(torch.zeros(2, 8))
            run.model.train()
            x = torch.full((4, 8), float(step + distributed.get_rank()))
            loss = run.model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
            frozen.append(run.frozen)
        run.close()
    trainable = all(parameter.requires_grad for parameter in model.parameters())
    return frozen, trainable, whole({name: entry.detach() for name, entry in model.named_parameters()})


WAYS = ("nothing", "refresh", "reading", "policy", "evaluation of the loop")


@pytest.mark.parametrize("where", WAYS)
def test_a_failure_of_ours_leaves_no_process_waiting(where, tmp_path):
    first, second = run_ranks(fail, where, str(tmp_path), timeout_s=30)
    assert first[0] == second[0] and first[1] and second[1]
    assert differences(first[2], second[2]) == []
    depth = {"nothing": 3, "evaluation of the loop": 3, "refresh": 0, "reading": 0, "policy": 0}[where]
    assert first[0][-1] == depth


# --- what a unit looks for at its first forward pass --------------------------------------------


def thaw_after_a_resume():
    """Freeze before the first forward pass of a model that computes in bfloat16, as a resumed run does, then thaw."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    model = encoder()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in model:
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    strategy = Sharded()
    modules = parse_modules(strategy.take(model))
    freezer = Freezer(model, modules)
    freezer.freeze_to(2)
    strategy.update()
    x = torch.ones(4, 8)
    model(x).float().square().mean().backward()
    freezer.thaw()
    strategy.update()
    model(x).float().square().mean().backward()
    return [str(entry.grad.dtype) for entry in model.parameters()]


def test_what_thaws_after_a_resume_has_gradients_in_its_own_format():
    for found in run_ranks(thaw_after_a_resume):
        assert set(found) == {"torch.float32"}


def refused_meshes():
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    replicated = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    hybrid = fully_shard(encoder(), mesh=replicated)
    hybrid_counted = set(element_shares(hybrid).values())
    at_the_root = fully_shard(encoder())
    with torch.no_grad():
        at_the_root(torch.ones(2, 8))  # leaves whole parameters
    strategy = choose_parallel(at_the_root)
    strategy.take(at_the_root)
    alone = choose_parallel(fully_shard(encoder(), mesh=replicated["shard"]))
    assert "some processes of the job only" in alone.refusal() and alone.num_ranks == 1
    return hybrid_counted, type(strategy).__name__, set(element_shares(at_the_root).values()), is_sharded(encoder())


def test_parts_that_are_in_several_processes_are_counted_once():
    for found in run_ranks(refused_meshes):
        assert found == ({0.5}, "Sharded", {1.0}, False)
