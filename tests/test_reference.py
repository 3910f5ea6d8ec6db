"""The reference model: how close each number format is, which one is taken, and what is left as it was."""

import copy
import random
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from examples.resnet import cifar_resnet
from torch import nn

import egeria
from egeria.model.cut import make_modules
from egeria.model.passes import Autocast, Batch, captures, undisturbed
from egeria.reference import Reference
from laws.models import MODELS, Transformer
from loops import outside
from menagerie import each_of_the_first

PLAIN, MIXED = (Autocast(device_type="cpu", enabled=enabled, dtype=torch.bfloat16) for enabled in (False, True))
LARGEST_ERRORS = {"int8": 0.1, "bf16": 0.03, "fp32": 1e-5}
each_precision = pytest.mark.parametrize("precision", LARGEST_ERRORS)


def batch_of(*args, autocast=PLAIN, **kwargs):
    return Batch(args=args, kwargs=kwargs, autocast=autocast)


def images(rows=8, side=10):
    return torch.randn(rows, 3, side, side, generator=torch.Generator().manual_seed(0))


def residual():
    torch.manual_seed(0)
    model = cifar_resnet(8)
    with torch.no_grad():
        for _ in range(2):  # so that running statistics are not those of the first day
            model.train()(images())
    return model, batch_of(images())


def transformer():
    torch.manual_seed(0)
    return Transformer(), batch_of(torch.randint(12, (8, 5)))


each_kind = pytest.mark.parametrize("make", [residual, transformer])


def taps_of(model):
    return [module.tap for module in make_modules(model)][:-1]


def moved(model):
    """Return the model after a few more steps."""
    model = copy.deepcopy(model)
    for tensor in model.state_dict().values():
        tensor.mul_(1 + 0.1 * torch.rand_like(tensor)) if tensor.is_floating_point() else None
    return model


def built(model, batch, precision="auto", taps=None, **options):
    reference = Reference(taps or taps_of(model), precision=precision, **options)
    reference.refresh(model, batch)
    return reference


def activations(reference, model, batch):
    return [reference.activation(tap, batch) for tap in taps_of(model)]


def error(reference, model, batch, tap):
    with undisturbed(model):
        expected = captures(model, [tap], batch.first_rows(None))[tap].float()
    found = reference.activation(tap, batch)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


@each_kind
@each_precision
def test_activations_are_close_to_float32(make, precision):
    model, batch = make()
    reference = built(model, batch, precision)
    assert reference.precision == precision
    assert [event.after for event in reference.take_events()] == [precision]
    for tap in taps_of(model):
        assert error(reference, model, batch, tap) < LARGEST_ERRORS[precision]
    assert precision != "int8" or ("static" if make is residual else "dynamic") in reference.builder


@each_of_the_first
def test_every_specimen_is_served(specimen):
    torch.manual_seed(0)
    model = specimen.build()
    args, kwargs = specimen.example(torch.Generator().manual_seed(0))
    batch = batch_of(*args, **kwargs).first_rows(None)
    reference = built(model, batch, "int8")
    for tap in taps_of(model):
        assert error(reference, model, batch.first_rows(None), tap) < LARGEST_ERRORS["int8"]
    reference.refresh(moved(model), batch)
    assert reference.activation(taps_of(model)[0], batch) is not None


def _shifted(self, x):
    return type(self).forward(self, x) + 5 * x.mean()


@pytest.mark.parametrize("how", ["forward", "hook", "weight norm"])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Linear])
def test_layers_that_do_more_than_their_class_says(kind, how, monkeypatch):
    monkeypatch.setattr("egeria.reference.FIDELITY_SHARE", 1.0)
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(3))), batch_of(images())
    if kind is nn.Linear:
        model, batch = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), batch_of(torch.rand(8, 8))
    if how == "forward":
        model[1].forward = types.MethodType(_shifted, model[1])
    elif how == "hook":
        model[1].register_forward_pre_hook(lambda _module, args: (args[0] + 5,))
    else:
        nn.utils.parametrizations.weight_norm(model[1])
    reference = built(model, batch, "int8", ["0", "1", "2"])
    for tap in ("0", "1", "2"):
        assert error(reference, model, batch, tap) < LARGEST_ERRORS["int8"]


def test_the_fastest_is_taken_by_times_measured_once():
    model, batch = residual()
    (event,) = (reference := built(model, batch)).take_events()
    measured = [part.split(" takes ") for part in event.reason.split("; ")]
    times = {name: float(milliseconds.split()[0]) for name, milliseconds in measured}
    assert times.keys() == {"int8", "bf16", "fp32"}
    assert reference.precision == event.after and times[event.after] == min(times.values())
    reference.refresh(moved(model), batch, {"layer1.0": 1.0})
    assert reference.take_events() == []


def test_a_format_that_is_too_coarse_gives_way_for_good(monkeypatch):
    model, batch = residual()
    with monkeypatch.context() as patch:
        patch.setattr("egeria.reference.FIDELITY_SHARE", 1e-9)
        assert built(model, batch, "int8").precision == "fp32"
    reference = built(model, batch, "int8")
    reference.take_events()
    for plasticity, expected in (({}, "int8"), ({"layer2.0": 1.0}, "int8"), ({"layer2.0": 1e-12}, "fp32")):
        reference.refresh(model, batch, plasticity)
        assert reference.precision == expected
    (event,) = reference.take_events()
    assert event.before == "int8" and "int8 is not used: ValueError: its SP loss at layer2.0" in event.reason
    reference.refresh(model, batch, {"layer2.0": 1.0})
    assert reference.precision == "fp32"


def test_a_batch_that_cannot_be_run_leaves_float32():
    model, batch = residual()
    reference = Reference(taps_of(model), precision="int8")
    assert reference.precision == "" and reference.state_dict() == {}
    reference.refresh(model, batch_of(torch.zeros(2, 5)))  # which the model cannot run
    (event,) = reference.take_events()
    assert event.after == "fp32" and "int8 is not used" in event.reason
    assert error(reference, model, batch, "layer1.0") < LARGEST_ERRORS["fp32"]


def test_a_torch_without_quantisation_is_no_obstacle(monkeypatch):
    model, batch = residual()
    resumed, state = Reference(taps_of(model)), built(model, batch, "int8").state_dict()
    monkeypatch.setitem(sys.modules, "torch.ao.quantization.quantize_fx", None)
    resumed.load_state_dict(state, model)
    for each, said in ((built(model, batch, "int8"), "int8 is not used"), (resumed, "int8 cannot go on here")):
        (event,) = each.take_events()
        assert event.after == "fp32" and said in event.reason
        assert error(each, model, batch, "layer2.0") < 1e-5


@each_kind
@each_precision
def test_a_refresh_starts_anew_and_a_saved_reference_goes_on_to_the_bit(make, precision, tmp_path):
    model, batch = make()
    kept, later = built(model, batch, precision), moved(model)
    first = activations(kept, model, batch)
    kept.refresh(later, batch)
    second = activations(kept, model, batch)
    assert not any(map(torch.equal, first, second))
    assert all(map(torch.equal, second, activations(built(later, batch, precision), model, batch)))
    torch.save(kept.state_dict(), tmp_path / "state.pt")
    resumed = Reference(taps_of(model))
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), model)
    assert all(map(torch.equal, second, activations(resumed, model, batch)))
    assert (resumed.precision, resumed.builder) == (kept.precision, kept.builder) and not resumed.take_events()


@pytest.mark.parametrize(("name", "precision"), [("residual", "int8"), ("transformer", "bf16")])
def test_a_frozen_front_and_our_hooks_do_not_travel(name, precision, tmp_path):
    torch.manual_seed(0)
    model, alone = MODELS[name].build(), MODELS[name].build()
    inputs, targets = MODELS[name].rows(torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = egeria.attach(model, optimizer, total_steps=20, directory=tmp_path, config={"policy": {"plan": "0:2"}})
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    assert run.frozen == 2
    alone.load_state_dict(model.state_dict())
    batch, before = batch_of(inputs), outside(model)
    found = activations(built(model, batch, precision), alone, batch)
    assert all(map(torch.equal, found, activations(built(alone, batch, precision), alone, batch)))
    assert outside(model) == before
    run.close()


@pytest.mark.parametrize("precision", ["auto", "int8"])
def test_nothing_else_is_touched(precision, monkeypatch):
    model, batch = residual()
    model.register_forward_hook(lambda *_: pytest.fail("a hook of the user's ran"))
    monkeypatch.setattr(torch.backends.quantized, "engine", "onednn")

    def everything():
        numbers = [tensor.tolist() for tensor in (*model.state_dict().values(), *batch.args)]
        states = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
        return numbers, states, outside(model), torch.backends.quantized.engine, list(warnings.filters)

    before = everything()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reference = built(model, batch, precision)
        reference.activation("layer2.0", batch)
        reference.refresh(model, batch, {"layer1.0": 1e-12})
        assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    assert everything() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", ["auto", "int8"])
def test_a_copy_on_the_gpu(precision):
    model, batch = residual()
    model.cuda()
    batch = batch.on("cuda")
    reference = built(model, batch, precision, device="cuda")
    assert reference.precision in {"auto": ("bf16", "fp32"), "int8": ("bf16",)}.get(precision, (precision,))
    assert reference.activation("layer2.0", batch).is_cuda
    assert error(reference, model, batch, "layer2.0") < 0.05
    assert not built(model, batch, "int8").activation("layer2.0", batch).is_cuda
