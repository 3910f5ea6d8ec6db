"""Looking into a model leaves no trace, whatever the model does and whatever goes wrong."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from egeria.model.batch import Autocast, Batch
from egeria.model.undisturbed import capture, undisturbed
from loops import outside

PLAIN = Autocast(device_type="cpu", enabled=False, dtype=torch.bfloat16)
BFLOAT16 = Autocast(device_type="cpu", enabled=True, dtype=torch.bfloat16)


def batch_of(*args, autocast=PLAIN, **kwargs):
    return Batch(args=args, kwargs=kwargs, autocast=autocast)


class Restless(nn.Module):
    """Draws random numbers, counts its calls and follows its input, in training and in inference."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("average", torch.zeros(8), persistent=False)
        self.modes = []

    def forward(self, x):
        self.modes.append((self.training, torch.is_grad_enabled()))
        self.calls += 1
        self.average.mul_(0.9).add_(x.detach().mean(dim=0))
        return x + torch.rand(x.shape)


class Breaking(nn.Module):
    """Raises in the middle of a forward pass."""

    def forward(self, x):
        raise RuntimeError("broken on purpose")


class Counting(nn.Linear):
    """A layer that counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def restless_model():
    """Modes as a user may have left them: one layer in inference mode within a model in training."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Restless(), nn.Sequential(nn.Dropout(), nn.Linear(8, 4)))
    model.train()
    model[1].eval()
    model[3][0].eval()
    return model


def everything(model):
    return {
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "random": torch.get_rng_state(),
        "gradients": torch.is_grad_enabled(),
        "fused": torch.backends.mha.get_fastpath_enabled(),
    }


def same(first, second):
    tensors = {**first["buffers"], "random": first["random"]}, {**second["buffers"], "random": second["random"]}
    plain = [
        {key: value for key, value in side.items() if key not in ("buffers", "random")} for side in (first, second)
    ]
    return plain[0] == plain[1] and all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())


class Remembering(nn.Module):
    """Keeps what published models keep outside of buffers: a momentum encoder, a queue, losses, generators."""

    def __init__(self):
        super().__init__()
        self.encoder, self.key = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.queue, self.losses, self.counts, self.tags = torch.zeros(8), [], {"calls": 0}, {"new"}
        self.random, self.numpy, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)

    def forward(self, x):
        self.key.weight.data = 0.9 * self.key.weight.data + 0.1 * self.encoder.weight.data
        self.queue.mul_(0.9).add_(0.1 * x.detach().mean(dim=0))
        y = self.encoder(x) + self.key(x) + torch.rand(8, generator=self.random)
        y = y + self.numpy.random() + self.python.random() + self.queue
        self.losses.append(y.square().mean())
        self.counts["calls"] += 1
        self.tags.add("used")
        return y


def test_nothing_is_left_of_what_a_model_keeps_in_attributes():
    x, twins = torch.ones(3, 8), []
    for looks in (False, True):
        torch.manual_seed(0)
        model = Remembering()
        key = model.key.weight
        for _ in range(3):
            if looks:
                with undisturbed(model, gradients=True):
                    model(x)
            output = model(x)
        assert model.key.weight is key and len(model.losses) == model.counts["calls"] == 3
        twins.append((output.detach(), model.key.weight, model.queue, torch.stack(model.losses).detach()))
    assert all(torch.equal(*pair) for pair in zip(*twins, strict=True))


def test_the_block_runs_in_inference_mode_without_gradients():
    model = restless_model()
    with undisturbed(model):
        assert not any(module.training for module in model.modules())
        assert not model(torch.ones(3, 8)).requires_grad
        assert model[2].modes == [(False, False)]
    assert model[2].modes == []


def test_nothing_of_a_pass_is_left():
    model = restless_model()
    before = everything(model)
    with undisturbed(model):
        model(torch.ones(3, 8))
        assert not same(before, everything(model)), "the test is empty unless the pass changes something"
    assert same(before, everything(model))


def test_nothing_of_a_pass_that_fails_is_left():
    for error in [RuntimeError, KeyboardInterrupt]:
        model = restless_model()
        before = everything(model)
        with pytest.raises(error), undisturbed(model):
            model(torch.ones(3, 8))
            raise error
        assert same(before, everything(model))


def test_buffers_are_the_same_tensors_afterwards_and_untouched_ones_keep_their_version():
    model = restless_model()
    before = dict(model.named_buffers())
    versions = {name: buffer._version for name, buffer in before.items()}
    with undisturbed(model):
        model(torch.ones(3, 8))
    after = dict(model.named_buffers())
    assert all(after[name] is buffer for name, buffer in before.items())
    assert after["1.running_mean"]._version == versions["1.running_mean"], "a saved graph may need it"


def test_the_fused_path_of_transformers_is_off_inside_and_as_before_outside():
    for enabled in [True, False]:
        found = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(enabled)
        try:
            with pytest.raises(RuntimeError, match="on purpose"), undisturbed(nn.Linear(1, 1)):
                assert not torch.backends.mha.get_fastpath_enabled()
                raise RuntimeError("on purpose")
            assert torch.backends.mha.get_fastpath_enabled() is enabled
        finally:
            torch.backends.mha.set_fastpath_enabled(found)


def test_a_capture_goes_no_further_than_the_tap():
    model = nn.Sequential(Counting(4, 4), Counting(4, 4), Counting(4, 4))
    capture(model, "1", batch_of(torch.ones(2, 4)))
    assert [layer.calls for layer in model] == [1, 1, 0]


def test_a_capture_leaves_no_hook_behind_even_when_the_model_breaks():
    for tap in ["0", "1", "2"]:
        model = nn.Sequential(nn.Linear(4, 4), Breaking(), nn.Linear(4, 4))
        before = outside(model)
        if tap == "0":
            assert capture(model, tap, batch_of(torch.ones(2, 4))) is not None
        else:
            with pytest.raises(RuntimeError, match="broken on purpose"):
                capture(model, tap, batch_of(torch.ones(2, 4)))
        assert outside(model) == before


class Choosy(nn.Module):
    """Has a layer it does not call and one that returns no activation; takes its input by name."""

    def __init__(self):
        super().__init__()
        self.used, self.unused, self.numbers = nn.Linear(4, 4), nn.Linear(4, 4), Numbers()

    def forward(self, x, *, scale):
        return self.numbers(self.used(x) * scale)


class Numbers(nn.Module):
    """Returns a tuple without any activation."""

    def forward(self, x):
        return torch.ones(2, 2, dtype=torch.long), x.sum(), x.sum(dim=1), "text"


def test_a_tap_that_gives_nothing_to_judge_gives_none():
    for tap in ["unused", "numbers"]:
        assert capture(Choosy(), tap, batch_of(torch.ones(2, 4), scale=2)) is None


def test_the_first_of_several_calls_counts():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Counting(4, 4)

        def forward(self, x):
            return self.layer(self.layer(x))

    model = Twice()
    x = torch.ones(2, 4)
    assert torch.equal(capture(model, "layer", batch_of(x)), functional.linear(x, model.layer.weight, model.layer.bias))
    assert model.layer.calls == 1


def test_a_capture_runs_under_the_autocast_of_the_batch():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    assert capture(model, "1", batch_of(x, autocast=BFLOAT16)).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert capture(model, "1", batch_of(x)).dtype == torch.float32
        assert Autocast.current("cpu") == BFLOAT16, "restored"
    assert not Autocast.current("cpu").enabled


def test_weights_cast_for_a_capture_do_not_reach_the_training_forward():
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with undisturbed(model):
            capture(model, "", batch_of(x, autocast=BFLOAT16))
        model(x).sum().backward()
    assert model.weight.grad is not None
