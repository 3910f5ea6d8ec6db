"""What a reference must not do: answer with the activations of another model, or change what a user hears."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from egeria.layers.batch import Autocast, Batch
from egeria.layers.taps import capture
from egeria.layers.undisturbed import undisturbed
from egeria.plasticity import sp_loss
from egeria.reference import Machine, QuantizedReference
from egeria.reference.formats import StaticInt8

pytestmark = pytest.mark.slow
BF16 = Machine(vnni=True, avx512_bf16=True)
PLAIN = Autocast(device_type="cpu", enabled=False, dtype=torch.bfloat16)
LIMITS = {"int8": 0.1, "bf16": 0.03, "fp32": 1e-5}
every_format = pytest.mark.parametrize("precision", LIMITS)


def batch_of(*args, **kwargs):
    return Batch(args=args, kwargs=kwargs, autocast=PLAIN)


def images(seed=0):
    return torch.randn(8, 3, 10, 10, generator=torch.Generator().manual_seed(seed))


def built(model, batch, precision, taps=("tail",)):
    reference = QuantizedReference(taps, precision=precision, machine=BF16)
    reference.refresh(model, batch)
    return reference


def assert_close(reference, model, batch, limit, tap="tail"):
    with undisturbed(model):
        expected = capture(model, tap, batch.first_rows(None))
    found = reference.activation(tap, batch)
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < limit


class Branching(nn.Module):
    """Two ways to the tail, one of them with a norm to fold."""

    def __init__(self, choose):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.other = nn.Conv2d(3, 8, 3)
        self.tail = nn.Conv2d(8, 8, 3)
        self.choose = choose

    def forward(self, x):
        return self.tail(self.one(x) if self.choose() else self.other(x))


class Noisy(Branching):
    """Draws what a graph can draw too, and in the same order in any memory layout."""

    def forward(self, x):
        x = self.one(x)
        return self.tail(x * (0.5 + torch.rand_like(x[:, :1, :1, :1])))


class Masked(Branching):
    """With an optional argument that a graph cannot do without, or has forgotten."""

    def __init__(self, forgets):
        super().__init__(lambda: True)
        self.forgets = forgets

    def forward(self, x, mask=None):
        x = self.one(x)
        if mask is not None:
            x = x + 1 if self.forgets else x * mask
        return self.tail(x)


DICE = {
    "python": lambda: random.random() < 0.5,
    "numpy": lambda: np.random.random() < 0.5,
    "torch": lambda: bool(torch.rand(()) < 0.5),
}


# Branches that a graph would not have


@every_format
@pytest.mark.parametrize("die", DICE)
def test_dice_are_thrown_at_every_call(die, precision):
    model, batch = Branching(DICE[die]), batch_of(images())
    reference = built(model, batch, precision)
    assert reference.number_format.startswith(precision), reference.reason
    for seed in range(6):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        assert_close(reference, model, batch, LIMITS[precision])


@every_format
def test_dice_that_a_graph_throws_too_stay_in_it(precision):
    model, batch = Noisy(None), batch_of(images())
    reference = built(model, batch, precision)
    assert reference._format.found["parts"].keys() == {""}
    for seed in range(3):
        torch.manual_seed(seed)
        assert_close(reference, model, batch, LIMITS[precision])


@every_format
def test_a_generator_of_its_own_keeps_a_module_from_being_traced(precision):
    model, batch = Branching(lambda: True), batch_of(images())
    model.dice = random.Random(0)
    parts = built(model, batch, precision)._format.found["parts"]
    assert parts and "" not in parts


@every_format
@pytest.mark.parametrize("forgets", [True, False], ids=["forgets", "fails"])
@pytest.mark.parametrize("first", ["with", "without"])
def test_an_optional_argument_may_come_and_go(first, forgets, precision):
    model, mask = Masked(forgets), torch.rand(8, 1, 8, 8)
    batches = [batch_of(images(), mask), batch_of(images())]
    kept, other = batches if first == "with" else batches[::-1]
    reference = built(model, kept, precision)
    assert_close(reference, model, kept, LIMITS[precision])
    for _ in range(2):
        assert_close(reference, model, other, LIMITS[precision])
        assert_close(reference, model, kept, LIMITS[precision])
    if first == "with":
        assert reference.number_format == "fp32" and reference.builder.startswith("fp32 copy, since a batch")
        assert reference.error("tail", sp_loss) == 0
        resumed = QuantizedReference(["tail"], precision=precision)
        resumed.load_state_dict(reference.state_dict(), model)
        assert torch.equal(resumed.activation("tail", other), reference.activation("tail", other))
        assert resumed.builder == "fp32 copy"


def test_a_new_batch_of_another_form_is_no_obstacle_to_measuring():
    model = Masked(forgets=False)
    reference = built(model, batch_of(images(), torch.rand(8, 1, 8, 8)), "int8")
    reference.refresh(model, batch_of(images()))
    assert 0 <= reference.error("tail", sp_loss) < 0.1
    assert reference.number_format == "bf16" and "traced with the arguments ['Tensor', 'Tensor']" in reference.reason


def test_a_batch_that_float32_cannot_run_either_leaves_the_folding():
    model = Branching(lambda: True)
    reference = built(model, batch_of(images()), "fp32")
    with pytest.raises(RuntimeError):
        reference.activation("tail", batch_of(torch.zeros(2, 5, 8, 8)))
    assert reference.builder == "fp32, batch norm folded"


@pytest.mark.parametrize("loader", ["auto", "int8", "bf16", "fp32"])
@every_format
def test_the_setting_of_whoever_loads_a_state_does_not_count(precision, loader):
    model, batch = Branching(lambda: True), batch_of(images())
    reference = built(model, batch, precision)
    resumed = QuantizedReference(["tail"], precision=loader, machine=BF16)
    resumed.load_state_dict(reference.state_dict(), model)
    for each in (reference, resumed):
        each.refresh(model, batch)
    assert resumed.number_format == reference.number_format and resumed.builder == reference.builder
    assert torch.equal(resumed.activation("tail", batch), reference.activation("tail", batch))


# Modules that do more than their class says


def _shifted_convolution(self, x):
    return self._conv_forward(x, self.weight, self.bias) + 5 * x.mean()


def _shifted_norm(self, x):
    return type(self).forward(self, x) + 5 * x.mean()


def _shifted_relu(self, x):
    return functional.relu(x) + 5 * x.mean()


def _shifted_linear(self, x):
    return functional.linear(x, self.weight, self.bias) + 5 * x.mean()


def _shifted_whole(self, x):
    return type(self).forward(self, x + 5)


PATCHES = {"0": _shifted_convolution, "1": _shifted_norm, "2": _shifted_relu, "": _shifted_whole}


def _convnet():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))


@every_format
@pytest.mark.parametrize("name", PATCHES)
def test_a_forward_put_on_an_instance_is_what_runs(name, precision):
    model, batch = _convnet(), batch_of(images() + 1)
    module = model.get_submodule(name)
    module.forward = types.MethodType(PATCHES[name], module)
    reference = built(model, batch, precision, ("1", "2", "3"))
    assert reference.number_format.startswith(precision), reference.reason
    for tap in ("1", "2", "3"):
        assert_close(reference, model, batch, LIMITS[precision], tap)


@pytest.mark.parametrize("precision", ["int8-dynamic", "bf16", "fp32"])
def test_a_forward_put_on_a_linear_layer_is_what_runs(precision):
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), batch_of(torch.rand(8, 8))
    model[0].forward = types.MethodType(_shifted_linear, model[0])
    reference = built(model, batch, precision, ("0", "2"))
    assert reference.number_format == precision, reference.reason
    for tap in ("0", "2"):
        assert_close(reference, model, batch, 0.03, tap)


def _add_five(_module, args):
    return (args[0] + 5, *args[1:])


@every_format
@pytest.mark.parametrize("name", PATCHES)
def test_hooks_in_front_of_a_module_keep_working(name, precision):
    model, batch = _convnet(), batch_of(images())
    model.get_submodule(name).register_forward_pre_hook(_add_five)
    reference = built(model, batch, precision, ("1", "2", "3"))
    assert reference.number_format.startswith(precision), reference.reason
    for tap in ("1", "2", "3"):
        assert_close(reference, model, batch, LIMITS[precision], tap)


# A format that gives something else


def _damage(monkeypatch, damage):
    whole = StaticInt8.readings
    monkeypatch.setattr(StaticInt8, "readings", lambda self, b: {tap: damage(a) for tap, a in whole(self, b).items()})


def test_activations_of_another_model_are_passed_over(monkeypatch):
    _damage(monkeypatch, lambda a: a + 10 * a.std())
    reference = built(_convnet(), batch_of(images()), "int8", ("2", "4"))
    assert reference.number_format == "bf16" and "2 differs from float32 by" in reference.reason


@pytest.mark.parametrize("scale", [0.0, 1e-6])
def test_activations_that_are_all_but_zero_are_not_compared(scale, monkeypatch):
    _damage(monkeypatch, lambda a: a + 1e-6)
    model = _convnet()
    with torch.no_grad():
        model[4].weight.mul_(scale)
        model[4].bias.zero_()
    assert built(model, batch_of(images()), "int8", ("2", "4")).number_format == "int8-static"


# Warnings

_FRESH = """
import warnings
import torch
from egeria.layers.batch import Batch
from egeria.layers.modules import parse_modules
from egeria.reference import QuantizedReference, Machine
from egeria.reference.snapshot import in_fp32
from menagerie import SPECIMENS
specimen = SPECIMENS["SkipConnected"]
torch.manual_seed(0)
model = specimen.build()
args, kwargs = specimen.example(torch.Generator().manual_seed(0))
batch = Batch(args=args, kwargs=kwargs, autocast=in_fp32("cpu"))
taps = [module.tap for module in parse_modules(model)]
warnings.simplefilter("error")
reference = QuantizedReference(taps, precision="int8", machine=Machine(vnni=True))
reference.refresh(model, batch)
for _ in range(3):
    for tap in taps:
        reference.activation(tap, batch)
    reference.refresh(model, batch)
assert reference.number_format == "int8-static", reference.reason
# And in one that goes on from a state, without a trial.
"""


@pytest.mark.parametrize("is_resumed", [False, True])
def test_joins_of_unlike_ranges_are_silent_in_a_new_process(is_resumed, tmp_path):
    script = _FRESH
    if is_resumed:
        saving = f'torch.save(reference.state_dict(), r"{tmp_path / "state.pt"}")'
        _run_anew(_FRESH + saving)
        loading = f'reference.load_state_dict(torch.load(r"{tmp_path / "state.pt"}", weights_only=True), model)'
        script = _FRESH.replace("reference.refresh(model, batch)", loading, 1)
    _run_anew(script)


def _run_anew(script):
    tests = Path(__file__).resolve().parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tests.parent / "src", tests)))}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""


def test_kernels_that_complain_at_every_call_are_not_heard(monkeypatch):
    def complaining(*call):
        warnings.warn("these ranges differ", UserWarning, stacklevel=1)
        return capture(*call)

    reference = built(_convnet(), batch := batch_of(images()), "int8", ("2", "3"))
    assert reference.number_format == "int8-static"
    monkeypatch.setattr("egeria.reference.snapshot.capture", complaining)
    for _ in range(2):
        assert reference.activation("3", batch) is not None
    assert reference.number_format == "int8-static"


@every_format
def test_what_a_user_hears_once_is_heard_once(precision):
    model, batch = _convnet(), batch_of(images())
    code = compile("import warnings; warnings.warn('only once', stacklevel=1)", "<user>", "exec")
    user = {"__name__": "user"}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("default")
        filters = list(warnings.filters)
        exec(code, user)
        reference = QuantizedReference(("2", "3"), precision=precision, machine=BF16)
        for _ in range(3):
            reference.refresh(copy.deepcopy(model), batch)
            reference.activation("3", batch)
            reference.error("3", sp_loss)
            reference.recalibrate()
            exec(code, user)
        while reference.escalate("on"):
            exec(code, user)
        assert warnings.filters == filters
    assert [str(warning.message) for warning in heard] == ["only once"]
