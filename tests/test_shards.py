"""Models sharded by `fully_shard`: frozen by a plan and trained as in one process, over the whole menagerie."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from egeria import attach, read_journal
from egeria.events import Declined, FaultCaught, ModuleFrozen, PlanMade, Thawed
from egeria.layers.batch import Autocast, Batch
from egeria.layers.freezing import Freezer
from egeria.layers.modules import parse_modules
from egeria.layers.shards import is_sharded, outline
from egeria.layers.taps import forward_shares
from egeria.parallel import Sharded, choose_parallel
from loops import Loop, differences
from menagerie import SPECIMENS, SUPPORTED_NAMES, of_menagerie
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
CONFIG = {"plasticity": {"interval_steps": 2}}
STEPS = 24
PLAN = "0.25:1 0.5:2 0.75:0 0.85:1"
EVERYTHING = 99
"""More layer modules than there are: all but the last."""


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
    loop = Loop(specimen, {"config": CONFIG, "plan": PLAN, "total_steps": STEPS, "directory": Path(folder, name)})
    frozen = []
    for _ in range(STEPS):
        loop.step()
        frozen.append(loop.run.frozen)
    loop.run.close()
    return frozen, whole(loop.everything())


def _is_close(first, second):
    return not isinstance(first, torch.Tensor) or torch.allclose(first, second, rtol=1e-4, atol=1e-6)


def decisions(folder):
    journal = read_journal(folder)
    return [(event.kind, event.step, event.reason) for kind in (ModuleFrozen, Thawed) for event in journal.of(kind)]


@pytest.mark.parametrize("name", of_menagerie(SUPPORTED_NAMES))
def test_two_ranks_that_share_the_parameters_freeze_and_train_like_one(name, tmp_path):
    two = run_ranks(train, name, str(tmp_path / "two"))
    if name in NOT_SHARDED:
        assert all(NOT_SHARDED[name] in found for found in two), "this model can be sharded now"
        pytest.skip(f"fully_shard cannot train it, with or without egeria: {NOT_SHARDED[name]}")
    [(frozen, end)] = run_ranks(train, name, str(tmp_path / "one"), num_ranks=1)
    for also, parts_end in two:
        assert also == frozen
        assert all(_is_close(*pair) for pair in zip(parts_end.values(), end.values(), strict=True))
        assert name in ROUNDED or differences(parts_end, end) == []
    one, of_parts = (read_journal(tmp_path / folder / name) for folder in ("one", "two"))
    assert decisions(tmp_path / "two" / name) == decisions(tmp_path / "one" / name)
    assert max(frozen) > 0 and one.of(Thawed) and not of_parts.of(FaultCaught)
    shares = [journal.first(PlanMade).skipped_share for journal in (one, of_parts)]
    assert shares[1] == pytest.approx(shares[0], rel=0.02)  # attention is counted a little differently without values


# --- a copy without weights that one process can run ----------------------------------------------


def copies():
    plain, model = encoder(), shard(encoder())
    before = {name: id(entry) for name, entry in model.named_parameters()}
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    batch = Batch(args=(x,), kwargs={}, autocast=Autocast.current("cpu"))
    copied, on_meta = outline(model, batch)
    shares = forward_shares(copied, parse_modules(copied), on_meta)
    is_plain = type(copied) is type(plain) and not any(
        module._forward_pre_hooks or module._forward_hooks for module in copied.modules()
    )
    is_counted = shares == pytest.approx(forward_shares(plain, parse_modules(plain), batch))
    outputs = torch.equal(model(x), plain(x))
    untouched = before == {name: id(entry) for name, entry in model.named_parameters()}
    return is_plain, is_counted, outputs, untouched


def encoder(width=8, depth=5):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers)


def test_the_copy_is_plain_and_the_model_stays_as_it_is():
    for found in run_ranks(copies):
        assert all(found)


# --- what is declined, and when something goes wrong ----------------------------------------------


class Branches(nn.Module):
    """`front` is a branch of its own, in front of nothing that trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.front, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return self.front(x), self.last(self.middle(x))


def train_encoder(where, folder, options):
    """Train a sharded model while something happens in one process."""
    model = shard(Branches() if where == "branch" else encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    leads = distributed.get_rank() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = {"config": CONFIG, "total_steps": 40, "directory": Path(folder), **options}
        run = attach(model, optimizer, **arguments) if where != "plain" else None
        frozen = []
        for step in range(40):
            if step == 20 and where == "policy" and not leads:
                run._session.parts.policy.observe_interval = None
            if step == 10 and where == "evaluation of the loop":
                model.eval()
                with torch.no_grad():
                    model(torch.zeros(2, 8))
            model.train()
            x = torch.full((4, 8), 0.01 * (step + distributed.get_rank()))
            output = model(x)
            loss = sum(part.square().mean() for part in (output if isinstance(output, tuple) else (output,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if run is not None:
                run.step(loss)
                frozen.append(run.frozen)
        if run is not None:
            run.close()
    trainable = all(parameter.requires_grad for parameter in model.parameters())
    return frozen, trainable, whole({name: entry.detach() for name, entry in model.named_parameters()})


def reasons(folder):
    return [event.reason for event in read_journal(folder).of(Declined) if event.what == "freezing"]


@pytest.mark.parametrize("where", ["nothing", "policy", "evaluation of the loop", "branch"])
def test_a_failure_of_ours_leaves_no_process_waiting(where, tmp_path):
    options = {"plan": f"0.2:1 0.4:{EVERYTHING}"}
    first, second = run_ranks(train_encoder, where, str(tmp_path), options, timeout_s=30)
    assert first[0] == second[0] and first[1] and second[1]
    assert differences(first[2], second[2]) == []
    assert first[0][-1] == {"nothing": 4, "evaluation of the loop": 4, "policy": 0, "branch": 0}[where]
    assert (max(first[0]) > 0) == (where != "branch")
    said = {"policy": "rank 1", "branch": "with front frozen an output of the model would have no gradient"}.get(where)
    assert [said in reason for reason in reasons(tmp_path)] == ([True] if said else [])


@pytest.mark.parametrize("controller", ["inline", "process"])
def test_a_policy_that_compares_activations_is_declined_and_all_train_on(controller, tmp_path):
    options = {"policy": "egeria", "controller": controller}
    found = run_ranks(train_encoder, "declined", str(tmp_path), options, timeout_s=30)
    plain = run_ranks(train_encoder, "plain", "", {}, timeout_s=30)
    for frozen, trainable, weights in found:
        assert frozen == [0] * 40 and trainable
        assert differences(weights, plain[0][2]) == []
    [reason] = reasons(tmp_path)
    assert "sharded by fully_shard" in reason and "plan='0.5:1'" in reason
    assert not read_journal(tmp_path).of(FaultCaught)


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
    at_the_root = fully_shard(encoder())
    with torch.no_grad():
        at_the_root(torch.ones(2, 8))  # leaves whole parameters
    strategy = choose_parallel(at_the_root)
    strategy.take(at_the_root)
    alone = choose_parallel(fully_shard(encoder(), mesh=replicated["shard"]))
    assert "some processes of the job only" in alone.refusal() and alone.num_ranks == 1
    return type(strategy).__name__, all(hasattr(entry, "full_tensor") for entry in at_the_root.parameters())


def test_parameters_are_put_in_parts_again_and_a_part_of_the_job_is_refused():
    for found in run_ranks(refused_meshes):
        assert found == ("Sharded", True)
    assert not is_sharded(encoder())
