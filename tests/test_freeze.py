"""Freezing the front of a model, thawing it, and what the user does to it meanwhile."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from egeria.model import freeze, hooks
from egeria.model.freeze import Freezer


@dataclass
class Part:
    """As `egeria.model.cut.LayerModule`, what a freezer reads of it."""

    name: str
    submodules: tuple[str, ...]
    parameters: tuple[str, ...]
    tap: str


@dataclass
class Cut:
    """As `egeria.model.cut.Cut`."""

    modules: tuple[Part, ...]
    trainable: tuple[bool, ...]
    detaches: tuple[bool, ...]
    is_reentrant: bool = False


def cut_by(model, *groups, keep=(), detaches=False, is_reentrant=False):
    """Return a cut into groups of submodules; a parameter belongs to the last that uses it."""
    owner = {
        parameter: index
        for index, group in enumerate(groups)
        for name in group
        for parameter in model.get_submodule(name).parameters()
    }
    named = [(name, p) for name, p in model.named_parameters() if p in owner and p.requires_grad and name not in keep]
    parts = tuple(
        Part(group[-1], tuple(group), tuple(name for name, p in named if owner[p] == index), group[-1])
        for index, group in enumerate(groups)
    )
    may = tuple(detaches and depth > 0 for depth in range(len(groups)))
    return Cut(parts, tuple(bool(part.parameters) for part in parts), may, is_reentrant)


class Block(nn.Module):
    def __init__(self, drop=None):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop = drop or nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(torch.relu(self.norm(self.linear(x))))


class Net(nn.Module):
    def __init__(self, drop=None, tied=False):
        super().__init__()
        self.stem = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList(Block(drop) for _ in range(3))
        self.head = nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.stem.weight

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


GROUPS = (["stem", "blocks.0"], ["blocks.1"], ["blocks.2", "head"])


def made(depth=0, keep=(), detaches=False, **options):
    torch.manual_seed(0)
    model = Net(**options)
    freezer = Freezer(model, cut_by(model, *GROUPS, keep=keep, detaches=detaches))
    freezer.freeze_to(depth)
    return model, freezer


def looks(model):
    """What can be seen of a model: modes, gradients, hooks, attributes."""
    return {
        name: (
            module.training,
            {key: (p.requires_grad, sorted(vars(p))) for key, p in module.named_parameters(recurse=False)},
            {key: len(table) for key, table in vars(module).items() if "_hooks" in key},
            sorted(vars(module)),
        )
        for name, module in model.named_modules()
    }


def trains(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def in_training_mode(model):
    return [name for name, module in model.named_modules() if module.training and name]


FRONT = ["stem", "blocks.0", "blocks.0.linear", "blocks.0.norm", "blocks.0.drop"]


# --- freezing and thawing ------------------------------------------------------------------------


def by_hand(model, depth):
    model.train()
    frozen = [module for group in GROUPS[:depth] for name in group for module in [model.get_submodule(name)]]
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for module in frozen:
        module.eval()
        for parameter in module.parameters():
            parameter.requires_grad_(False).grad = None


def trained(freeze_to):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    change = freeze_to(model)
    for step, depth in enumerate([0, 2, 2, 1, 1, 0, 0, 1]):
        model.train()
        change(depth)
        loss = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_frozen_parameters_hold_no_gradient_and_submodules_are_in_eval_mode():
    model, freezer = made()
    model(torch.randn(3, 4)).sum().backward()
    freezer.freeze_to(1)
    model.eval()
    model.train()
    model.blocks.train()
    model.blocks[0].train()
    assert all(parameter.grad is None for parameter in model.blocks[0].parameters())
    assert model.blocks[1].linear.weight.grad is not None
    assert not set(FRONT) & set(in_training_mode(model)) and "blocks.1.drop" in in_training_mode(model)


def test_a_normalisation_that_is_kept_trainable_stays_as_the_user_has_it():
    keep = ("blocks.0.norm.weight", "blocks.0.norm.bias")
    model, freezer = made(1, keep=keep)
    assert model.blocks[0].norm.training and not model.blocks[0].drop.training
    assert set(keep) <= set(trains(model)) and "blocks.0.linear.weight" not in trains(model)
    freezer.freeze_to(0)
    assert model.blocks[0].norm.training


def test_a_layer_module_in_which_nothing_trains_keeps_its_owners_modes():
    model = Net()
    model.stem.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    freezer = Freezer(model, cut_by(model, *GROUPS))
    freezer.freeze_to(2)
    assert model.blocks[0].drop.training and not model.blocks[1].drop.training
    freezer.freeze_to(0)
    assert not model.blocks[0].linear.weight.requires_grad and model.blocks[1].linear.weight.requires_grad


# --- what the user changes meanwhile -------------------------------------------------------------


def test_a_mode_set_before_the_freeze_follows_the_loop():
    for calls_train, expected in ((False, False), (True, True)):
        model, freezer = made()
        model.blocks[0].norm.eval()
        freezer.freeze_to(1)
        if calls_train:
            model.train()
        freezer.freeze_to(0)
        assert model.blocks[0].norm.training is expected
        assert model.blocks[0].drop.training


def test_modes_restored_one_by_one_behind_a_validation():
    model, freezer = made()
    model.blocks[0].norm.eval()
    freezer.freeze_to(1)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for module, mode in modes.items():  # as Lightning does
        module.training = mode
    freezer.freeze_to(0)
    assert model.blocks[0].drop.training and not model.blocks[0].norm.training


def test_a_thaw_in_evaluation_gives_the_mode_of_evaluation():
    model, freezer = made(2)
    model.eval()
    freezer.freeze_to(0)
    assert in_training_mode(model) == []


class Calibrated(nn.Module):
    """Keeps its norm in eval mode by a `train` of its class, and counts the calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), []

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        self.calls.append(mode)
        return self

    def forward(self, x):
        return self.norm(self.linear(x))


def stay(self_or_mode=True):
    return None


def test_a_train_of_the_users_class_or_instance_goes_on_to_be_called():
    model = nn.Sequential(Calibrated(), Calibrated(), nn.Linear(4, 2))
    model[0].linear.train = stay
    model.train()
    freezer = Freezer(model, cut_by(model, ["0"], ["1"], ["2"]))
    freezer.freeze_to(1)
    model.eval()
    model.train()
    assert model[0].calls == [True, False, True] and not model[0].training
    freezer.freeze_to(0)
    assert model[0].training and not model[0].norm.training and model[0].linear.train is stay


# --- copies --------------------------------------------------------------------------------------


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "python pickle": lambda model: pickle.loads(pickle._dumps(model, protocol=2)),
    "torch.save": saved,
    "average": lambda model: AveragedModel(model).module,
    "twice": lambda model: copy.deepcopy(saved(copy.deepcopy(model))),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_frozen_model_follows_its_owner(way):
    model, freezer = made(2, tied=True, detaches=True)
    before = looks(model)
    made_copy = WAYS[way](model)
    assert looks(model) == before
    assert all(map(torch.equal, made_copy.state_dict().values(), model.state_dict().values()))
    assert not made_copy.blocks[0].linear.weight.requires_grad and not made_copy.blocks[0].norm.training
    assert not any(vars(parameter) for parameter in made_copy.parameters())
    made_copy.train().requires_grad_(True)
    assert len(in_training_mode(made_copy)) == len(list(made_copy.modules())) - 1
    made_copy(torch.randn(3, 4)).sum().backward()
    assert made_copy.blocks[0].linear.weight.grad is not None and made_copy.stem.weight.grad is not None
    assert not model.blocks[0].norm.training and model.blocks[0].linear.weight.grad is None
    again = Freezer(made_copy, cut_by(made_copy, *GROUPS))
    again.freeze_to(1)
    made_copy.train()
    assert not made_copy.blocks[0].norm.training and made_copy.blocks[1].norm.training
    again.freeze_to(0)
    freezer.freeze_to(0)
    assert made_copy.train().blocks[0].norm.training and made_copy is made_copy.train()


def test_a_file_needs_no_egeria():
    model, _ = made(2, tied=True, detaches=True)
    assert b"egeria" not in pickle.dumps(nn.ModuleList([model.blocks[0].norm, model.blocks[1].linear]))
    assert b"egeria" not in pickle.dumps([dict(model.blocks[1]._forward_hooks), list(model.parameters())])


# --- interrupts ----------------------------------------------------------------------------------


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that runs in the files of the freezer."""

    def __init__(self, at=None):
        self.at, self.lines = at, []

    def __call__(self, frame, event, _arg) -> Any:
        if frame.f_code.co_filename not in (freeze.__file__, hooks.__file__):
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def run(self, action):
        before = sys.gettrace()
        sys.settrace(self)
        try:
            action()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)


def moments(action):
    """Return when each line runs for the first, the second and the last time."""
    tracer = Interrupt()
    tracer.run(action)
    found = {}
    for at, line in enumerate(tracer.lines, 1):
        found.setdefault(line, []).append(at)
    return sorted({at for times in found.values() for at in (*times[:2], times[-1])})


@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 1), (2, 0), (1, 2)])
def test_an_interrupt_at_any_line_is_made_good_by_the_next_call(first, second):
    def prepared():
        return made(first, tied=True, detaches=True)

    expected = {depth: looks(made(depth, tied=True, detaches=True)[0]) for depth in (0, 1, 2)}
    found = moments(partial(prepared()[1].freeze_to, second))
    assert len(found) > 50
    for at in found:
        model, freezer = prepared()
        Interrupt(at).run(partial(freezer.freeze_to, second))
        assert not freezer.is_whole or looks(model) == expected[first], "interrupted before it began"
        model(torch.randn(3, 4))
        model.train()
        then = second if at % 2 else 2 - second
        freezer.freeze_to(then)
        assert freezer.depth == then and freezer.is_whole and freezer.moved() == []
        assert looks(model) == expected[then], at
        freezer.freeze_to(0)
        assert looks(model) == expected[0], at


def test_an_interrupt_in_a_call_of_train_is_made_good_by_the_next():
    expected = looks(made()[0])
    for at in moments(made(2)[0].train):
        model, freezer = made(2)
        model.eval()
        Interrupt(at).run(model.train)
        model.train()
        assert not any(module.training for module in model.blocks[0].modules())
        freezer.freeze_to(0)
        assert looks(model) == expected


# --- what moves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_parameters_of_any_dtype_are_compared(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    freezer = Freezer(model, cut_by(model, ["0"], ["1"]))
    freezer.freeze_to(1)
    assert freezer.moved() == []
    with torch.no_grad():
        model[0].weight[1, 2] += 1
    assert freezer.moved() == ["0.weight"]


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_what_is_multiplied_by_a_power_of_two_has_moved(factor):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    freezer = Freezer(model, cut_by(model, ["0"], ["1"]))
    freezer.freeze_to(1)
    with torch.no_grad():
        model[0].weight.mul_(factor)
    assert freezer.moved() == ["0.weight"]


def test_statistics_made_anew_on_the_frozen_model():
    data = [torch.randn(16, 4, generator=torch.Generator().manual_seed(i)) * 3 + 1 for i in range(5)]
    (plain, _), (model, freezer) = made(drop=nn.Identity()), made(2, drop=nn.Identity())
    for net in (plain, model):
        net.train()
        net(data[0])
        update_bn(data, net)
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))
    model.train()
    assert not model.blocks[0].norm.training and model.blocks[2].norm.training and freezer.moved() == []
    model.load_state_dict(plain.state_dict())
    model.train()
    assert not model.blocks[0].norm.training


# --- gradients in the front ----------------------------------------------------------------------


class Backwards:
    """Counts the gradients that reach the outputs of submodules."""

    def __init__(self, *submodules):
        self.count = 0
        for submodule in submodules:
            submodule.register_forward_hook(self.follow)

    def follow(self, _module, _args, output):
        output = output[0] if isinstance(output, tuple) else output
        if output.grad_fn is not None:
            output.register_hook(self.note)

    def note(self, _gradient):
        self.count += 1


def gradients(model, x=None):
    model.zero_grad()
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) if x is None else x).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_tied_weight_does_not_keep_the_fronts_backward_pass():
    model, freezer = made(2, tied=True, detaches=True, drop=nn.Identity())
    backwards = Backwards(model.stem, *model.blocks)
    gradients(model)
    assert backwards.count == 1, "of the active block"
    assert model.stem.weight.grad is not None, "by the head"
    freezer.freeze_to(1)
    gradients(model)
    assert backwards.count == 3
    freezer.freeze_to(1, detaches=False)
    gradients(model)
    assert backwards.count == 7


@pytest.mark.parametrize("switch", ["call", "assignment"])
def test_what_the_user_trains_in_the_front_gets_its_gradient(switch):
    model, _ = made(2, tied=True, detaches=True)
    gradients(model)
    if switch == "call":
        model.blocks[0].requires_grad_(True)
    else:
        model.blocks[0].linear.weight.requires_grad = True
    gradients(model)
    assert model.blocks[0].linear.weight.grad is not None


class Checkpointed(nn.Module):
    """Blocks whose own call is checkpointed, as in transformers."""

    def __init__(self, is_reentrant):
        super().__init__()
        self.embedding, self.is_reentrant = nn.Embedding(9, 4), is_reentrant
        self.blocks = nn.ModuleList(Outer(is_reentrant) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Outer(nn.Module):
    def __init__(self, is_reentrant):
        super().__init__()
        self.linear, self.is_reentrant, self.runs = nn.Linear(4, 4), is_reentrant, 0

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.is_reentrant) if self.training else self.inner(x)

    def inner(self, x):
        self.runs += 1
        return torch.tanh(self.linear(x))


def require_gradients(_module, _args, output):
    output.requires_grad_(True)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("makes_leaf", [False, True])
def test_checkpointed_blocks(is_reentrant, makes_leaf):
    torch.manual_seed(0)
    model = Checkpointed(is_reentrant)
    if makes_leaf:  # as `enable_input_require_grads`, which shows only once the embedding is frozen
        model.embedding.register_forward_hook(require_gradients)
    groups = (["embedding", "blocks.0"], ["blocks.1"], ["blocks.2", "head"])
    freezer = Freezer(model, cut_by(model, *groups, detaches=True, is_reentrant=is_reentrant))
    freezer.freeze_to(2)
    tokens = torch.arange(6).reshape(2, 3)
    expected = torch.autograd.grad(
        model.head(model.blocks[2].inner(model.blocks[1](model.blocks[0](model.embedding(tokens).detach())))).sum(),
        [*model.blocks[2].parameters(), *model.head.parameters()],
    )
    backwards = Backwards(model.blocks[0])
    for block in model.blocks:
        block.runs = 0
    found = gradients(model, tokens)
    assert all(map(torch.equal, found, expected))
    assert backwards.count == 0, "the backward pass of the front has run"
    assert [block.runs for block in model.blocks] == [1, 1, 2]
    freezer.freeze_to(0)
    gradients(model, tokens)
    assert backwards.count == 1 and model.embedding.weight.grad is not None


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_gradient_checkpointing_of_transformers_under_full_fine_tuning(is_reentrant):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 4}
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=20, **sizes))
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
        {"use_reentrant": is_reentrant}
    )
    model.train()
    layers = [f"bert.encoder.layer.{index}" for index in range(4)]
    groups = (["bert.embeddings", layers[0]], [layers[1]], [layers[2], layers[3]], ["bert.pooler", "classifier"])
    freezer = Freezer(model, cut_by(model, *groups, detaches=True, is_reentrant=is_reentrant))
    backwards = Backwards(*(model.get_submodule(name) for name in (*layers[:2], "bert.embeddings")))
    tokens, labels = torch.randint(0, 20, (4, 5)), torch.tensor([0, 1, 0, 1])

    def train():
        model.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        return backwards.count

    assert (count := train()) > 0
    freezer.freeze_to(2)
    for _ in range(2):
        assert train() == count, "the backward pass of the frozen front has run"
    assert model.get_submodule(layers[2]).output.dense.weight.grad.abs().sum() > 0
    freezer.freeze_to(0)
    assert train() > count and model.bert.embeddings.word_embeddings.weight.grad is not None
