"""Copies of a model made while its front is frozen: the model as the user's own training would have it."""

import copy
import io
import pickle
import time
from functools import partial

import cloudpickle
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import egeria
from egeria.layers.copies import PlainCopies, without_ours
from egeria.layers.freezing import Freezer
from egeria.layers.modules import parse_modules
from egeria.skipping.replay import _answer


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.norm(self.linear(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CopiesItself(Net):
    def __deepcopy__(self, memo):
        made = type(self)()
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "python pickle": lambda model: pickle.loads(pickle._dumps(model, protocol=2)),
    "cloudpickle": lambda model: pickle.loads(cloudpickle.dumps(model)),
    "torch.save": saved,
    "average": lambda model: AveragedModel(model).module,
    "in a list": lambda model: copy.deepcopy([model])[0],
}


def user_froze(model):
    model.stem.weight.requires_grad_(False)
    model.blocks[0].norm.eval()
    return model


def frozen(kind=Net, depth=2):
    torch.manual_seed(0)
    model = user_froze(kind())
    freezer = Freezer(model, parse_modules(model, pattern=r"blocks\.\d"))
    freezer.freeze_to(depth)
    return model, freezer


def looks(model):
    """What a user can see of a model, apart from values."""
    return {
        name: (
            module.training,
            {key: entry.requires_grad for key, entry in module.named_parameters(recurse=False)},
            {key: len(table) for key, table in vars(module).items() if "_hooks" in key},
            sorted(vars(module)),
        )
        for name, module in model.named_modules()
    }


def test_a_copy_of_a_frozen_model_is_the_model_before_the_freeze():
    for copied in WAYS.values():
        for kind in [Net, CopiesItself]:
            model, freezer = frozen(kind)
            before, during = looks(user_froze(kind())), looks(model)
            made = copied(model)
            assert looks(made) == before
            assert all(
                torch.equal(a, b) for a, b in zip(made.state_dict().values(), model.state_dict().values(), strict=True)
            )
            assert not any(vars(parameter) for parameter in made.parameters())
            assert looks(model) == during, "the original has changed"
            freezer.thaw()
            model.blocks[0].norm.eval()
            assert looks(model) == before
            assert not any(vars(parameter) for parameter in model.parameters())


def test_a_submodule_copied_alone_trains():
    for copied in WAYS.values():
        model, _ = frozen()
        made = copied(model.blocks[1])
        assert made.training and made.norm.training and made.drop.training
        assert all(parameter.requires_grad for parameter in made.parameters())
        assert not made._forward_pre_hooks
        assert copied(model.blocks[1].linear).weight.requires_grad


def test_a_file_needs_no_egeria():
    model, _ = frozen()
    assert b"egeria" not in pickle.dumps(nn.Sequential(model.blocks[0].linear, model.blocks[1].norm))
    assert b"egeria" not in pickle.dumps(list(model.parameters()))


def test_a_model_in_inference_mode_is_copied_in_that_mode():
    model, _ = frozen()
    model.eval()
    assert not any(module.training for module in copy.deepcopy(model).modules())


def test_an_optimizer_copied_with_the_model_trains_the_copy():
    for way in ["deepcopy", "pickle", "torch.save"]:
        model, _ = frozen()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for pair in ([optimizer, model], [model, optimizer]):
            parts = WAYS[way](pair)
            made, its = (parts[1], parts[0]) if pair[0] is optimizer else parts
            held = {id(parameter) for group in its.param_groups for parameter in group["params"]}
            assert held == {id(parameter) for parameter in made.parameters()}
            assert made.blocks[0].linear.weight.requires_grad


def test_hooks_of_the_user_are_copied_and_stay():
    model, _ = frozen()
    model.blocks[0].register_forward_pre_hook(notice)
    made = copy.deepcopy(model)
    assert list(made.blocks[0]._forward_pre_hooks.values()) == [notice]
    assert len(model.blocks[0]._forward_pre_hooks) == 2


def notice(_module, _args):
    return None


def test_what_a_user_has_put_on_the_instance_copies_it_as_ever():
    model = Net()
    model.__deepcopy__ = lambda memo: "the user's own"
    kept = PlainCopies(model)
    assert copy.deepcopy(model) == "the user's own"
    kept.remove()
    assert copy.deepcopy(model) == "the user's own"


def test_several_may_keep_the_same_module_out_of_copies():
    model = Net()
    first, second = PlainCopies(model), PlainCopies(model)
    first.remove()
    first.remove()
    assert "__reduce_ex__" in vars(model)
    second.remove()
    assert sorted(vars(model)) == sorted(vars(Net()))


def test_a_forward_that_we_replaced_is_the_users_own_in_a_copy():
    stub = partial(_answer)
    assert "forward" not in without_ours({"forward": stub, "_forward_hooks": {}})
    stub.own_forward = notice
    assert without_ours({"forward": stub})["forward"] is notice


def test_a_frozen_wrapper_of_ddp_is_copied_plain(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, _ = frozen()
        wrapper = nn.parallel.DistributedDataParallel(model)
        for made in (pickle.loads(pickle.dumps(wrapper)), copy.deepcopy(wrapper)):
            assert looks(made.module) == looks(user_froze(Net()))
            made(torch.randn(3, 4)).sum().backward()
            assert made.module.blocks[0].linear.weight.grad is not None
        # Threads of gloo let go of the last reduction a moment later, for which they need the GIL; torch joins them
        # with the GIL held when the last wrapper goes, and hung here once.
        time.sleep(0.5)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["inline", "process"])
def test_a_model_with_accelerates_mixed_precision_has_a_reference(tmp_path, kind):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    torch.manual_seed(0)
    model, loader = Net(), DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,))), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model = accelerator.prepare(model)
    config = {"policy": {"name": "egeria"}, "plasticity": {"interval_steps": 2, "window": 2}}
    config |= {"bootstrapping": {"change_threshold": 1.0}, "controller": {"budget_share": 1000.0, "load_limit": 1.0}}
    run = egeria.attach(model, optimizer, loader, config=config, directory=tmp_path, controller=kind)
    declined, readings = [], []
    end = time.monotonic() + 60
    while not readings and not declined and time.monotonic() < end:
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
            if kind == "process":
                time.sleep(0.05)
        events = egeria.journal.read_journal(tmp_path).events
        declined = [e for e in events if type(e).__name__ in ("Declined", "FaultCaught")]
        readings = [e for e in events if type(e).__name__ == "PlasticityRead"]
    run.close()
    assert not declined, declined
    assert readings
