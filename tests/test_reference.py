"""The reference model in cheap number formats: which one, how close, and what happens when one fails."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
import warnings
from collections import UserDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from benchmarks.models.convnets import mobilenet_v2, resnet50
from benchmarks.models.segmentation import unet
from examples.resnet import cifar_resnet
from torch import nn

import egeria
from egeria import read_journal
from egeria.errors import ConfigError, ReferenceModelError
from egeria.events import FaultCaught, PlasticityRead, RungTaken
from egeria.layers.batch import Autocast, Batch
from egeria.layers.modules import parse_modules
from egeria.layers.taps import capture
from egeria.layers.undisturbed import undisturbed
from egeria.plasticity import sp_loss
from egeria.reference import (
    Machine,
    QuantizedReference,
    machine,
    quantization,
    warm_up,
)
from egeria.reference.formats import StaticInt8
from loops import FAST, outside
from menagerie import SPECIMENS, each_supported

OLD = Machine()
VNNI = Machine(vnni=True)
BF16 = Machine(vnni=True, avx512_bf16=True)
AMX = Machine(vnni=True, avx512_bf16=True, amx=True)
PLAIN = Autocast(device_type="cpu", enabled=False, dtype=torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def _warm():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        warm_up()
    assert heard == []


def batch_of(*args, autocast=PLAIN, **kwargs):
    return Batch(args=args, kwargs=kwargs, autocast=autocast)


def taps_of(model):
    return [module.tap for module in parse_modules(model)]


def trained(model, images):
    """A model whose running statistics and norms are not those of the first day."""
    model.train()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.1)
        for _ in range(2):
            model(images)
    return model


def resnet():
    torch.manual_seed(0)
    images = torch.randn(8, 3, 16, 16)
    return trained(cifar_resnet(8), images), batch_of(images)


def moved(model):
    """The model after a few more steps."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1 + 0.1 * torch.rand_like(tensor))
    return model


def built(model, batch, taps=None, **options):
    reference = QuantizedReference(taps or taps_of(model), **options)
    reference.refresh(model, batch)
    return reference


def activations(reference, taps, batch):
    return [reference.activation(tap, batch) for tap in taps]


def exact(model, tap, batch):
    with undisturbed(model):
        return capture(model, tap, batch.first_rows(None))


def relative_error(found, expected):
    return float((found - expected.float()).norm() / expected.float().norm())


class Mlp(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Choosy(nn.Module):
    """Cannot be traced as a whole: what it does depends on data."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x, scale=None):
        x = self.stem(x)
        if x.mean() > 1e9:
            x = x * 0
        if scale is not None:
            x = x * scale
        for stage in self.stages:
            x = x + stage(x)
        return self.head(x.mean((2, 3)))


class Optional(nn.Module):
    """Traced without an error, and wrongly, since a proxy is never None."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x, shift=None):
        x = self.first(x)
        if shift is not None:
            x = x + 1
        return self.second(x)


# The choice of a format


def test_the_machine_decides_the_format():
    for here, conv, linear in [
        (OLD, ("int8-static", "fp32"), ("int8-dynamic", "fp32")),
        (VNNI, ("int8-static", "fp32"), ("int8-dynamic", "fp32")),
        (BF16, ("int8-static", "bf16", "fp32"), ("int8-dynamic", "bf16", "fp32")),
        (AMX, ("int8-static", "bf16", "fp32"), ("bf16", "fp32")),
    ]:
        images, vectors = resnet(), (Mlp(), batch_of(torch.randn(4, 32)))
        for (model, batch), expected in ((images, conv), (vectors, linear)):
            reference = built(model, batch, machine=here)
            rungs = [reference.number_format]
            while reference.escalate("more exact, please"):
                rungs.append(reference.number_format)
            assert tuple(rungs) == expected
            changes = reference.take_changes()
            assert [change.before for change in changes] == ["", *expected[:-1]]
            assert [change.after for change in changes] == list(expected)
            assert all(change.reason for change in changes)
            assert reference.take_changes() == []
            assert not reference.escalate("again") and reference.number_format == "fp32"


def test_a_precision_can_be_chosen():
    model, batch = resnet()
    found = {
        precision: built(model, batch, precision=precision, machine=BF16) for precision in ("int8", "bf16", "fp32")
    }
    assert {name: reference.number_format for name, reference in found.items()} == {
        "int8": "int8-static",
        "bf16": "bf16",
        "fp32": "fp32",
    }
    assert found["int8"].builder == "int8 static, x86 engine, 8 of 8 weighted layers"
    assert "'bf16'" in found["bf16"].reason
    words = built(Mlp(), batch_of(torch.randn(4, 32)), precision="int8-dynamic", machine=AMX)
    assert words.number_format == "int8-dynamic" and words.builder == "int8 dynamic, x86 engine, 3 of 3 weighted layers"
    with pytest.raises(ConfigError, match="precision must be one of"):
        QuantizedReference(["0"], precision="int4")


def test_the_machine_is_what_onednn_may_use(monkeypatch):
    for cap, expected in [
        ("AVX2", (False, False, False)),
        ("AVX512_CORE", (False, False, False)),
        ("avx512_core_vnni", (True, False, False)),
        ("AVX512_CORE_BF16", (True, True, False)),
        ("AVX512_CORE_AMX", (True, True, True)),
        ("AVX10_1_512_AMX", (True, True, True)),
        ("DEFAULT", (True, True, True)),
        (None, (True, True, True)),
    ]:
        for old_torch in [False, True]:
            for name in ("_is_vnni_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
                if old_torch:
                    monkeypatch.delattr(torch.cpu, name, raising=False)
                else:
                    monkeypatch.setattr(torch.cpu, name, lambda: True, raising=False)
            monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx512_vnni", "avx512_bf16", "amx_bf16"}))
            monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
            if cap:
                monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", cap)
            here = Machine.here()
            assert (here.vnni, here.avx512_bf16, here.amx) == expected


def test_without_a_batch_it_waits_in_float32():
    model, batch = resnet()
    reference = QuantizedReference(taps_of(model), machine=BF16)
    assert reference.number_format == "" and reference.builder == ""
    reference.refresh(model)
    assert reference.number_format == "fp32" and "no batch" in reference.reason
    assert reference.error("layer1.0", sp_loss) == 0
    reference.refresh(model)
    assert reference.number_format == "fp32"
    reference.refresh(model, batch)
    assert [(change.before, change.after) for change in reference.take_changes()] == [
        ("", "fp32"),
        ("fp32", "int8-static"),
    ]


def test_taps_are_named_beforehand():
    model, batch = resnet()
    with pytest.raises(ReferenceModelError, match="Name it when building one"):
        built(model, batch, machine=BF16).activation("layer1", batch)


def test_it_must_be_refreshed_first():
    with pytest.raises(ReferenceModelError, match="Call `refresh` first"):
        QuantizedReference(["0"]).activation("0", batch_of(torch.zeros(1, 3)))


# How close


@pytest.mark.parametrize(
    "precision", ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "fp32"))]
)
@pytest.mark.parametrize(
    ("build", "side"),
    [
        (lambda: cifar_resnet(8, shortcut="project"), 16),
        (lambda: mobilenet_v2(10, 0.25), 64),
        (lambda: resnet50(10, 8), 32),
        (lambda: unet(3), 16),
        (Choosy, 16),
        (Optional, 16),
    ],
    ids=["resnet", "mobilenet", "bottlenecks", "unet", "choosy", "optional"],
)
def test_activations_of_convolutions_are_close(build, side, precision):
    torch.manual_seed(0)
    images = torch.randn(8, 3, side, side)
    model, batch = trained(build(), images), batch_of(images)
    reference = built(model, batch, precision=precision, machine=BF16)
    assert reference.number_format.startswith(precision), reference.reason
    limit = {"int8": 0.25, "bf16": 0.05, "fp32": 1e-5}[precision]
    for tap in taps_of(model):
        expected = exact(model, tap, batch)
        found = reference.activation(tap, batch)
        assert found.dtype == torch.float32 and found.shape == expected.shape
        assert relative_error(found, expected) < limit


def huggingface(name):
    transformers = pytest.importorskip("transformers", reason="transformers is in the dev extra")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    words = {"input_ids": torch.randint(1, 50, (4, 8)), "attention_mask": torch.ones(4, 8, dtype=torch.long)}
    pixels = {"pixel_values": torch.randn(4, 3, 32, 32)}
    torch.manual_seed(0)
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(vocab_size=50, **small)), words
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2)
        return transformers.GPT2LMHeadModel(config), words
    if name == "t5":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(vocab_size=50, decoder_start_token_id=0, **sizes)
        return transformers.T5ForConditionalGeneration(config), {**words, "labels": words["input_ids"]}
    if name == "vit":
        return transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **small)), pixels
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config), pixels


@pytest.mark.parametrize(
    ("name", "rung"),
    [
        ("bert", "int8-dynamic"),
        ("vit", "int8-dynamic"),
        ("t5", "int8-dynamic"),
        ("gpt2", "bf16"),
        ("resnet", "int8-static"),
    ],
)
def test_activations_of_huggingface_models_are_close(name, rung):
    model, kwargs = huggingface(name)
    batch = batch_of(**kwargs)
    reference = built(model, batch, machine=BF16)
    assert reference.number_format == rung, reference.reason
    if name == "gpt2":
        assert "int8-dynamic does not work here: ValueError: int8 has kernels for" in reference.reason
    for tap in taps_of(model):
        expected = exact(model, tap, batch)
        assert relative_error(reference.activation(tap, batch), expected) < 0.15


@each_supported
@pytest.mark.parametrize("here", [OLD, pytest.param(AMX, marks=pytest.mark.slow)], ids=["old", "amx"])
def test_every_beast_is_served(specimen, here):
    torch.manual_seed(0)
    model = specimen.build()
    args, kwargs = specimen.example(torch.Generator().manual_seed(0))
    batch = batch_of(*args, **kwargs)
    taps = taps_of(model)
    reference = built(model, batch.first_rows(None), taps, machine=here)
    for tap in taps:
        expected = exact(model, tap, batch.first_rows(None))
        found = reference.activation(tap, batch.first_rows(None))
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert relative_error(found, expected) < 0.3
    reference.refresh(moved(model), batch)
    reference.activation(taps[0], batch)


def test_seven_bits_without_vnni():
    model, batch = resnet()
    errors = [built(model, batch, machine=here).error("layer3.0", sp_loss) for here in (OLD, VNNI)]
    assert errors[0] > 1.5 * errors[1]


# Weights move on


def mlp():
    return Mlp(), batch_of(torch.randn(8, 32))


@pytest.mark.parametrize(
    ("build", "precision"),
    [
        *((resnet, precision) for precision in ("int8", "bf16", "fp32")),
        *((mlp, precision) for precision in ("int8", "int8-dynamic", "bf16", "fp32")),
    ],
)
def test_weights_taken_over_in_place_equal_a_new_build(build, precision):
    torch.manual_seed(0)
    model, batch = build()
    taps = taps_of(model)
    kept = built(model, batch, precision=precision, machine=BF16)
    first = activations(kept, taps, batch)
    kept.refresh(moved(model))
    second = activations(kept, taps, batch)
    assert all(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert kept.is_stale == (kept.number_format == "int8-static")
    # A state carries the ranges, and loading builds anew.
    anew = QuantizedReference(taps, precision=precision, machine=BF16)
    anew.load_state_dict(kept.state_dict(), moved(model))
    assert all(map(torch.equal, second, activations(anew, taps, batch)))
    assert anew.number_format == kept.number_format and anew.builder == kept.builder


def test_recalibration_finds_new_ranges():
    model, batch = resnet()
    reference = built(model, batch, machine=BF16)
    assert not reference.is_stale and not reference.recalibrate()
    with torch.no_grad():
        model.conv1.weight.mul_(3)
        model.bn1.weight.mul_(30)
    reference.refresh(model, batch)
    assert reference.is_stale
    before = reference.error("layer3.0", sp_loss)
    reference.take_changes()
    assert reference.recalibrate() and not reference.is_stale
    assert reference.error("layer3.0", sp_loss) < before / 10
    assert reference.take_changes() == []
    fresh = built(model, batch, machine=BF16)
    assert torch.equal(reference.activation("layer3.0", batch), fresh.activation("layer3.0", batch))


def test_new_shapes_are_built_anew():
    torch.manual_seed(0)
    images = torch.randn(4, 3, 16, 16)
    reference = built(cifar_resnet(8), batch_of(images), ["layer1", "layer2"], machine=BF16)
    reference.refresh(cifar_resnet(20))
    assert reference.number_format == "int8-static" and not reference.is_stale
    assert reference.builder.endswith("20 of 20 weighted layers")


@pytest.mark.parametrize("build", [resnet, lambda: (Mlp(), batch_of(torch.randn(8, 32)))], ids=["conv", "linear"])
def test_a_saved_reference_goes_on_to_the_bit(build, tmp_path):
    torch.manual_seed(0)
    model, batch = build()
    taps = taps_of(model)
    first = built(model, batch, machine=BF16)
    first.refresh(moved(model))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = QuantizedReference(taps, machine=BF16)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), model)
    while True:
        assert all(map(torch.equal, activations(first, taps, batch), activations(second, taps, batch)))
        assert (first.number_format, first.reason, first.is_stale) == (
            second.number_format,
            second.reason,
            second.is_stale,
        )
        assert first.error(taps[0], sp_loss) == second.error(taps[0], sp_loss)
        if first.number_format == "fp32":
            break
        third = moved(moved(model))
        first.refresh(third)
        second.refresh(third)
        assert first.escalate("on") == second.escalate("on") == (first.number_format != "")
    empty = QuantizedReference(taps)
    assert empty.state_dict() == {}
    empty.load_state_dict({}, model)
    assert empty.number_format == ""


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class OfObjects(nn.Module):
    """Takes one object with tensors in it, as tokenizers and loaders of graphs give."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, given):
        first, second = given.values() if isinstance(given, UserDict) else given
        for layer in self.layers:
            first = torch.tanh(layer(first)) + second
        return first


@pytest.mark.parametrize("kind", [Pair, UserDict])
def test_a_checkpoint_holds_no_object_of_the_loop_s_own(kind, tmp_path):
    torch.manual_seed(0)
    model = OfObjects()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    config = {key: value for key, value in FAST.items() if key != "policy"}
    run = egeria.attach(model, optimizer, config=config, policy="egeria", controller="inline", directory=tmp_path)

    def train(count):
        for _ in range(count):
            first, second = torch.randn(2, 6, 8)
            loss = model(kind(first, second) if kind is Pair else kind(first=first, second=second)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)

    train(10)
    torch.save({"model": model.state_dict(), "run": run.state_dict()}, tmp_path / "checkpoint.pt")
    run.packed.load_state_dict(run.packed.state_dict())
    num_before = len(read_journal(tmp_path).of(PlasticityRead))
    train(10)
    run.load_state_dict(torch.load(tmp_path / "checkpoint.pt")["run"])
    train(10)
    run.close()
    journal = read_journal(tmp_path)
    assert not journal.of(FaultCaught) and len(journal.of(PlasticityRead)) > num_before + 4


# Failures


def test_what_cannot_be_built_is_passed_over(monkeypatch):
    model, batch = resnet()
    monkeypatch.setattr(quantization.StaticPart, "convert", lambda *_: 1 / 0)
    reference = built(model, batch, machine=BF16)
    (change,) = reference.take_changes()
    assert change == RungTaken(step=0, before="", after="bf16", reason=reference.reason)
    assert "int8-static does not work here: ZeroDivisionError" in change.reason


def test_a_torch_without_quantisation_is_no_obstacle(monkeypatch):
    model, batch = resnet()
    state = built(model, batch, machine=BF16).state_dict()
    quantization.load_toolkit.cache_clear()
    monkeypatch.setitem(sys.modules, "torch.ao.quantization", None)
    monkeypatch.setitem(sys.modules, "torch.ao.nn.quantized", None)
    try:
        reference = built(model, batch, machine=VNNI)
        assert reference.number_format == "fp32" and "int8 needs torch.ao.quantization" in reference.reason
        resumed = QuantizedReference(taps_of(model), machine=BF16)
        resumed.load_state_dict(state, model)
        assert resumed.number_format == "bf16" and "int8-static could not go on" in resumed.reason
        assert relative_error(resumed.activation("layer2.0", batch), exact(model, "layer2.0", batch)) < 0.05
    finally:
        quantization.load_toolkit.cache_clear()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda x: x * float("nan"), "is not finite"),
        (lambda x: x[:1], "has the shape"),
        (lambda x: None, "gives no tensor"),
    ],
)
def test_unusable_activations_are_passed_over(damage, message, monkeypatch):
    model, batch = resnet()
    whole = StaticInt8.readings
    monkeypatch.setattr(StaticInt8, "readings", lambda self, b: {tap: damage(a) for tap, a in whole(self, b).items()})
    reference = built(model, batch, machine=BF16)
    assert reference.number_format == "bf16" and message in reference.reason


def test_a_failure_while_running_leads_on(monkeypatch):
    model, batch = resnet()
    reference = built(model, batch, machine=BF16)
    with pytest.raises(RuntimeError):  # float32 cannot do this either
        reference.activation("layer1.0", batch_of(torch.zeros(2, 5, 16, 16)))
    assert reference.number_format == "int8-static"
    monkeypatch.setattr(StaticInt8, "activation", lambda *_: 1 / 0)
    assert reference.activation("layer1.0", batch).shape == (8, 16, 16, 16)
    assert reference.number_format == "bf16" and "ZeroDivisionError" in reference.reason


def test_what_cannot_be_copied_is_refused():
    specimen = SPECIMENS["Uncopyable"]
    with pytest.raises(ReferenceModelError, match="deep copy"):
        QuantizedReference(["parts.0"]).refresh(specimen.build(), batch_of(torch.randn(2, 8)))


def test_a_batch_that_does_not_run_leaves_the_copy():
    model, _ = resnet()
    reference = built(model, batch_of(torch.zeros(2, 5)), machine=BF16)
    assert reference.number_format == "fp32" and "cannot be run" in reference.reason


# Fidelity


def test_errors_fall_along_the_ladder():
    model, batch = resnet()
    reference = built(model, batch, machine=BF16)
    taps = taps_of(model)
    errors = []
    while True:
        errors.append([reference.error(tap, sp_loss) for tap in taps])
        if not reference.escalate("more exact"):
            break
    assert all(int8 > 3 * bf16 > 0 == fp32 for int8, bf16, fp32 in zip(*errors, strict=True))


def test_a_transformer_in_eight_bits_is_less_exact_than_in_bf16():
    model, kwargs = huggingface("bert")
    with torch.no_grad():
        for module in model.encoder.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(10)  # with weights of the first day, the layers hardly count beside the shortcuts
    reference = built(model, batch_of(**kwargs), machine=BF16)
    eight = reference.error("encoder.layer.1", sp_loss)
    reference.escalate("more exact")
    assert eight > reference.error("encoder.layer.1", sp_loss) > 0


# Nothing else changes


@pytest.mark.parametrize("precision", ["int8", "int8-dynamic", "bf16", "fp32"])
def test_nothing_else_is_touched(precision):
    model, batch = resnet()
    model.register_forward_hook(lambda *_: None)
    model.conv1.requires_grad_(False)
    before, weights = outside(model), {name: t.clone() for name, t in model.state_dict().items()}
    images = batch.args[0].clone()
    engine = torch.backends.quantized.engine
    other = next(e for e in torch.backends.quantized.supported_engines if e not in ("none", "x86"))
    torch.backends.quantized.engine = other
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            reference = built(model, batch, precision=precision, machine=BF16)
            reference.refresh(moved(model), batch)
            reference.activation("layer2.0", batch)
            reference.error("layer2.0", sp_loss)
            reference.recalibrate()
            while reference.escalate("on"):
                reference.activation("layer2.0", batch)
            assert torch.is_autocast_enabled("cpu")
        assert torch.backends.quantized.engine == other
    finally:
        torch.backends.quantized.engine = engine
    assert torch.is_grad_enabled()
    assert outside(model) == before
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(images, batch.args[0])


@pytest.mark.parametrize("precision", ["int8", "bf16", "fp32"])
def test_random_states_stay(precision):
    model, batch = resnet()
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    reference = built(model, batch, precision=precision, machine=BF16)
    reference.refresh(model, batch)
    reference.activation("layer2.0", batch)
    reference.recalibrate()
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_mixed_precision_of_the_batch():
    model, batch = resnet()
    mixed = batch_of(*batch.args, autocast=Autocast(device_type="cpu", enabled=True, dtype=torch.bfloat16))
    other = batch_of(*batch.args, autocast=Autocast(device_type="cuda", enabled=True, dtype=torch.float16))
    for precision in ("int8", "bf16"):
        reference = built(model, mixed, precision=precision, machine=BF16)
        assert torch.equal(reference.activation("layer2.0", mixed), reference.activation("layer2.0", other))
    reference = built(model, mixed, precision="fp32")
    assert torch.equal(reference.activation("layer2.0", mixed), exact(model, "layer2.0", mixed).float())
    assert relative_error(reference.activation("layer2.0", other), exact(model, "layer2.0", batch)) < 1e-5


def test_it_runs_no_further_than_the_tap():
    model, batch = resnet()
    reference = built(model, batch, machine=BF16)
    ran = []
    graph = reference._format._model
    for node in graph.graph.nodes:
        if node.op == "call_module":
            module = graph.get_submodule(node.target)
            forward = module.forward
            module.forward = lambda *a, f=forward, n=node.target: (ran.append(n), f(*a))[1]
    reference.activation("layer1.0", batch)
    assert ran and not any(name.startswith(("layer2.0", "layer3.0", "linear")) for name in ran)


# Elsewhere


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_a_copy_on_the_gpu(precision):
    model, batch = resnet()
    model.cuda()
    on_gpu = batch_of(batch.args[0].cuda())
    reference = built(model, on_gpu, precision=precision, device="cuda")
    assert reference.number_format == ("bf16" if precision == "auto" else "fp32")
    for _ in range(3):
        found = reference.activation("layer2.0", on_gpu)
        assert found.is_cuda and found.dtype == torch.float32
        assert relative_error(found, exact(model, "layer2.0", on_gpu)) < 0.05
        reference.refresh(model, on_gpu)
    on_cpu = built(model, on_gpu)
    assert on_cpu.number_format == "int8-static" and not on_cpu.activation("layer2.0", on_gpu).is_cuda


_FASTEST = """
import torch
from benchmarks.micro.reference_speed import SUBJECTS
torch.set_num_threads(1)
from egeria.reference import QuantizedReference, Machine, warm_up
from benchmarks.micro.reference_speed import measure_speed
from egeria.layers.modules import parse_modules
warm_up()
for name in ("resnet20", "minilm"):
    subject = SUBJECTS[name]()
    taps = [module.tap for module in parse_modules(subject.model)]
    speeds = {}
    for precision in ("auto", "int8", "bf16", "fp32"):
        reference = QuantizedReference(taps, precision=precision)
        reference.refresh(subject.model, subject.batch)
        if precision == "auto":
            chosen = reference.number_format
        else:
            speeds[reference.number_format] = measure_speed(subject, reference, taps[-1], 3)
    print(name, chosen, speeds)
    assert speeds[chosen] >= 0.9 * max(speeds.values())
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cap", ["AVX2", "AVX512_CORE_VNNI", "DEFAULT"])
def test_the_chosen_format_is_the_fastest(cap):
    pytest.importorskip("transformers", reason="transformers is in the dev extra")
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join(map(str, [root, root / "src"]))
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": cap, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", _FASTEST], env=environment, capture_output=True, text=True, timeout=390, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
