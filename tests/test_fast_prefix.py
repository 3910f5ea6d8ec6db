from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from egeria import tree
from egeria.layers.batch import Autocast, Batch
from egeria.layers.freezer import Freezer
from egeria.layers.inference import folding
from egeria.layers.inference.fast_prefix import FastPrefix, FastPrefixError
from egeria.layers.parse import parse_modules
from egeria.layers.undisturbed import undisturbed
from egeria.testing import MENAGERIE
from egeria.testing.convnets import cifar_resnet, mobilenet_v2
from loops import outside

SUPPORTED = [specimen for specimen in MENAGERIE if not specimen.unsupported]
UNIT_BF16 = 2**-7


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def batch_of(*args, autocast=False, **kwargs):
    setting = Autocast(device_type="cpu", enabled=autocast, dtype=torch.bfloat16)
    return Batch(args=args, kwargs=kwargs, autocast=setting)


def with_statistics(model):
    """Give every norm statistics and parameters that folding must not ignore."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            with torch.no_grad():
                module.running_mean.normal_(generator=generator)
                module.running_var.uniform_(0.5, 2, generator=generator)
                if module.affine:
                    module.weight.uniform_(0.5, 1.5, generator=generator)
                    module.bias.normal_(generator=generator)
    return model.train()


def frozen(model, depth):
    """Freeze as the library does, and call `train` as loops do."""
    modules = parse_modules(model)
    freezer = Freezer(model, modules)
    freezer.freeze_to(depth)
    model.train()
    return freezer, [name for module in modules[:depth] for name in module.submodules]


class Net(nn.Module):
    """A prefix of one convolution and norm, a last layer, and something to be done in between."""

    def __init__(self, between=None, convolution=None, norm=None):
        super().__init__()
        self.conv = convolution or nn.Conv2d(3, 4, 3, padding=1)
        self.norm = norm or nn.BatchNorm2d(4)
        self.other = nn.Conv2d(4, 4, 1)
        self.other_norm = nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 2, 1)
        self.between = between
        with_statistics(self)
        for module in (self.conv, self.norm, self.other, self.other_norm):
            module.requires_grad_(False).eval()

    def forward(self, x):
        y = self.conv(x)
        z = self.between(self, y) if self.between else self.norm(y)
        return self.head(self.other_norm(self.other(torch.relu(z))))


ROOTS = ("conv", "norm", "other", "other_norm")
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def build(net, autocast=False, **options):
    return FastPrefix.build(net, ROOTS, batch_of(IMAGES.clone(), autocast=autocast), **options)


def outputs(model, roots, batch, fast):
    """What roots and model return in a training forward with the fast prefix, or without where it is None."""
    found = []
    with undisturbed(model, keeps_modes=True):
        handles = [
            model.get_submodule(name).register_forward_hook(lambda _m, _a, out: found.append(tree.detach(out)))
            for name in roots
            if fast is None or model.get_submodule(name) not in fast.folded
        ]
        with fast.running() if fast else nullcontext(), batch.autocast.context():
            call = batch.first_rows(None)
            result = model(*call.args, **call.kwargs)
        for handle in handles:
            handle.remove()
    return [leaf.clone() for leaf in tree.leaves([found, result])]


def assert_close(plain, fast, tolerance):
    assert len(plain) == len(fast)
    for one, two in zip(plain, fast, strict=True):
        assert one.dtype == two.dtype and one.shape == two.shape
        scale = one.double().abs().max().clamp_min(1e-9)
        assert (one.double() - two.double()).abs().max() <= tolerance * scale


def without_folded(model, roots, fast):
    return [name for name in roots if fast is None or model.get_submodule(name) not in fast.folded]


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("specimen", SUPPORTED, ids=lambda specimen: specimen.name)
def test_every_specimen_at_every_depth_computes_the_same(specimen, autocast):
    torch.manual_seed(0)
    model = with_statistics(specimen.build())
    modules = parse_modules(model)
    args, kwargs = specimen.example(torch.Generator().manual_seed(0))
    batch = batch_of(*args, autocast=autocast, **kwargs)
    freezer = Freezer(model, modules)
    for depth in range(1, len(modules)):
        freezer.freeze_to(depth)
        model.train()
        roots = [name for module in modules[:depth] for name in module.submodules]
        before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        seen = outside(model)
        fast = FastPrefix.build(model, roots, batch)
        assert outside(model) == seen
        assert torch.equal(random, torch.get_rng_state())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        if fast is None:
            continue
        assert not fast.is_stale()
        plain = outputs(model, without_folded(model, roots, fast), batch, None)
        assert_close(plain, outputs(model, roots, batch, fast), 6 * UNIT_BF16 if autocast else 1e-4)
        assert outside(model) == seen
    freezer.thaw()
    model.train()


@pytest.mark.parametrize(
    ("name", "folds"), [("residual", True), ("group_norm", False), ("spectral_norm", False), ("chain", False)]
)
def test_what_has_nothing_to_gain_has_no_fast_prefix(name, folds):
    (specimen,) = (specimen for specimen in SUPPORTED if specimen.name == name)
    model = specimen.build()
    _, roots = frozen(model, len(parse_modules(model)) - 1)
    args, _ = specimen.example(torch.Generator().manual_seed(0))
    fast = FastPrefix.build(model, roots, batch_of(*args))
    assert bool(fast and fast.num_folded) == folds == (fast is not None)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("make", "side", "depth", "folds"),
    [(lambda: cifar_resnet(8, shortcut="project"), 16, 2, 6), (lambda: mobilenet_v2(10, 0.25), 32, 1, 21)],
    ids=["resnet", "mobilenet"],
)
def test_nets_fold_every_norm_and_hand_on_the_layout_they_had(make, side, depth, folds, autocast, layout):
    model = with_statistics(make().to(memory_format=layout))
    _, roots = frozen(model, depth)
    inside = {module for name in roots for module in model.get_submodule(name).modules()}
    batch = batch_of(torch.randn(4, 3, side, side).contiguous(memory_format=layout), autocast=autocast)
    fast = FastPrefix.build(model, roots, batch)
    assert fast.num_folded == sum(isinstance(module, nn.BatchNorm2d) for module in inside) >= folds
    assert fast.is_channels_last == (layout is torch.contiguous_format)
    plain = outputs(model, without_folded(model, roots, fast), batch, None)
    found = outputs(model, roots, batch, fast)
    assert_close(plain[:-1], found[:-1], 6 * UNIT_BF16 if autocast else 1e-4)
    assert fast.error <= (6 * UNIT_BF16 if autocast else 1e-5)
    for index in (-2, -1):
        assert plain[index].stride() == found[index].stride(), "the suffix must not see another layout"


def test_folded_bfloat16_is_as_close_to_float32_as_unfolded():
    model = with_statistics(cifar_resnet(20))
    _, roots = frozen(model, 2)
    images = torch.randn(8, 3, 32, 32)
    low, full = batch_of(images, autocast=True), batch_of(images)
    fast = FastPrefix.build(model, roots, low)
    kept = without_folded(model, roots, fast)
    exact, plain, folded = (outputs(model, kept, full, None), *(outputs(model, kept, low, f) for f in (None, fast)))

    def distance(found):
        return max(float((a - b.float()).abs().max() / a.abs().max()) for a, b in zip(exact[:-1], found, strict=False))

    assert distance(folded) <= 1.5 * distance(plain)
    assert distance(folded) > 1e-3, "it must be of the precision of training, not above"


def test_float64_stays_float64():
    net = Net().double()
    fast = FastPrefix.build(net, ROOTS, batch_of(IMAGES.double()))
    assert fast.num_folded == 2 and fast.error < 1e-12 and not fast.is_channels_last


def test_one_and_three_dimensions_and_norms_without_parameters_are_folded():
    for dims, convolution, norm in ((1, nn.Conv1d, nn.BatchNorm1d), (3, nn.Conv3d, nn.BatchNorm3d)):
        net = nn.Sequential(
            convolution(2, 3, 2, bias=False, padding=1, padding_mode="circular"), norm(3, affine=False), nn.Flatten(2)
        )
        with_statistics(net).eval().requires_grad_(False)
        fast = FastPrefix.build(net, ("0", "1"), batch_of(torch.randn(2, 2, *[4] * dims)))
        assert fast.num_folded == 1 and 0 < fast.error < 1e-5


def test_training_behind_a_fast_prefix_learns_the_same():
    weights = []
    for uses_it in (False, True):
        torch.manual_seed(0)
        model = with_statistics(cifar_resnet(8))
        _, roots = frozen(model, 1)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        fast = FastPrefix.build(model, roots, batch_of(torch.randn(4, 3, 16, 16)))
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            with fast.running() if uses_it else nullcontext():
                output = model(torch.randn(4, 3, 16, 16, generator=generator))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.allclose(*weights, rtol=1e-3, atol=1e-5) and not torch.equal(*weights)


@pytest.mark.parametrize(
    "between",
    [
        lambda net, y: net.norm(y) + y,
        lambda net, y: net.norm(y) * y.mean(),
        lambda net, y: (setattr(net, "kept", y), net.norm(y))[1],
        lambda net, y: net.norm(functional.relu(y, inplace=True)),
        lambda net, y: net.norm(y + 0),
        lambda net, y: net.norm(net.norm(y)),
        lambda net, y: net.norm(net.conv(y[:, :3])),
        lambda net, y: (functional.relu(net.norm(y)), y.relu_())[0] + y,
    ],
    ids=["sum", "scale", "attribute", "in place", "copy", "norm twice", "convolution twice", "later"],
)
def test_a_convolution_that_others_read_keeps_its_norm_and_others_fold(between):
    net = Net(between)
    fast = build(net)
    assert fast.folded == {net.other}
    assert_close([net(IMAGES)], [running(fast, net)], 1e-4)
    assert "kept" not in vars(net) or torch.equal(net.kept, net.conv(IMAGES))


def running(fast, net, images=IMAGES):
    with fast.running():
        return net(images)


class Watching(nn.Conv2d):
    """A user's own kind."""


def _altered(change):
    net = Net()
    change(net)
    return net


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.conv.register_forward_hook(lambda *_: None),
        lambda net: net.norm.register_forward_pre_hook(lambda *_: None),
        lambda net: nn.utils.parametrizations.weight_norm(net.conv),
        lambda net: setattr(net, "conv", Watching(3, 4, 3, padding=1).requires_grad_(False)),
        lambda net: vars(net.conv).update(forward=net.conv.forward),
        lambda net: net.norm.train(),
        lambda net: net.norm.weight.requires_grad_(True),
        lambda net: net.conv.weight.requires_grad_(True),
        lambda net: setattr(net, "norm", nn.BatchNorm2d(4, track_running_stats=False).requires_grad_(False).eval()),
        lambda net: setattr(net, "norm", nn.InstanceNorm2d(4)),
    ],
    ids=[
        "hook",
        "pre-hook",
        "parametrized",
        "subclass",
        "forward",
        "training",
        "affine",
        "weight",
        "batch",
        "instance",
    ],
)
def test_what_is_not_plain_or_not_frozen_is_left_alone(change):
    net = _altered(change)
    assert build(net).folded == {net.other}


def test_a_prefix_that_looks_at_its_numbers_is_left_alone_where_it_does():
    def between(net, y):
        if not y.isfinite().all():
            raise ValueError("not finite")
        return net.norm(y)

    net = Net(between)
    assert build(net).folded == {net.other}


def test_a_view_that_channels_last_does_not_allow_keeps_the_layout():
    net = Net(lambda net, y: net.norm(y).view(len(y), -1).view(y.shape))
    fast = build(net)
    assert fast.num_folded == 2 and not fast.is_channels_last
    assert Net() and build(Net()).is_channels_last


def test_an_input_of_another_size_is_computed_in_the_layout_it_would_have_had():
    net = Net(lambda net, y: net.norm(y) if y.shape[-1] == 8 else net.norm(y).view(len(y), -1).view(y.shape))
    fast = build(net)
    assert fast.is_channels_last
    images = torch.randn(2, 3, 6, 6)
    assert_close([net(images)], [running(fast, net, images)], 1e-4)


class ToChannelsLast(nn.Module):
    def forward(self, x):
        return x.contiguous(memory_format=torch.channels_last)


def test_a_boundary_that_is_channels_last_by_itself_stays_it():
    net = Net()
    model = nn.Sequential(nn.Sequential(net.conv, net.norm, ToChannelsLast()), nn.ReLU(), net.head)
    fast = FastPrefix.build(model, ("0",), batch_of(IMAGES))
    assert fast.num_folded == 1 and not fast.is_channels_last
    plain, found = (outputs(model, ("0",), batch_of(IMAGES), which) for which in (None, fast))
    assert [leaf.stride() for leaf in plain] == [leaf.stride() for leaf in found]


def test_outputs_that_skip_far_ahead_are_handed_on_contiguous():
    class Far(Net):
        def forward(self, x):
            first = torch.relu(self.norm(self.conv(x)))
            self.seen = [first.is_contiguous()]
            return self.head(self.other_norm(self.other(first)) + first)

    net = Far()
    fast = build(net)
    assert fast.is_channels_last and {net.norm, net.other_norm} == set(fast.restored)
    running(fast, net)
    assert net.seen == [True]


def test_another_way_than_the_tried_one_is_noticed_and_leaves_nothing():
    net = Net(lambda net, y: net.norm(y) if net.straight else y)
    net.straight = True
    fast = build(net)
    assert fast.num_folded == 2
    net.straight = False
    before = outside(net)
    with pytest.raises(FastPrefixError, match="without the fast prefix"):
        running(fast, net)
    assert outside(net) == before
    net.straight = True
    assert_close([net(IMAGES)], [running(fast, net)], 1e-4)


def test_an_output_overwritten_on_its_way_to_the_norm_is_noticed():
    net = Net(lambda net, y: net.norm(y if net.straight else y.relu_()))
    net.straight = True
    fast = build(net)
    assert fast.num_folded == 2
    net.straight = False
    with pytest.raises(FastPrefixError):
        running(fast, net)


def test_a_norm_back_in_training_mode_is_noticed():
    net = Net()
    fast = build(net)
    net.norm.train()
    with pytest.raises(FastPrefixError):
        running(fast, net)


def test_an_error_in_the_forward_passes_and_leaves_nothing():
    net = Net(lambda net, y: 1 / 0 if net.fails else net.norm(y))
    net.fails = False
    fast = build(net)
    before = outside(net)
    net.fails = True
    with pytest.raises(ZeroDivisionError):
        running(fast, net)
    assert outside(net) == {**before, "attributes": outside(net)["attributes"]}
    assert "forward" not in vars(net.conv) and "forward" not in vars(net.norm)
    net.fails = False
    assert_close([net(IMAGES)], [running(fast, net)], 1e-4)


def test_a_forward_the_user_put_on_a_root_is_put_back():
    net = Net()
    stage = nn.Sequential(net.conv, net.norm)
    model = nn.Sequential(stage, nn.Conv2d(4, 2, 1))
    mine = stage.forward = lambda x: type(stage).forward(stage, x) * 2
    fast = FastPrefix.build(model, ("0",), batch_of(IMAGES))
    assert fast.num_folded == 1
    assert_close([model(IMAGES)], [running(fast, model)], 1e-4)
    assert vars(stage)["forward"] is mine


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.load_state_dict(net.state_dict()),
        lambda net: net.norm.running_var.mul_(2),
        lambda net: net.conv.requires_grad_(True),
        lambda net: net.other.register_forward_hook(lambda *_: None),
        lambda net: setattr(net.conv, "weight", nn.Parameter(net.conv.weight.clone(), requires_grad=False)),
        lambda net: setattr(net.norm, "running_mean", net.norm.running_mean.clone()),
    ],
    ids=["load", "statistics", "thaw", "hook", "parameter", "buffer"],
)
def test_changes_make_it_stale(change):
    net = Net()
    fast = build(net)
    running(fast, net)
    assert not fast.is_stale()
    change(net)
    assert fast.is_stale()


def test_the_model_copies_and_saves_as_ever():
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fast = build(net)
    running(fast, net)
    assert net.state_dict().keys() == before.keys()
    twin = copy.deepcopy(net)
    torch.save(net, io.BytesIO())
    pickle.dumps(net)
    nn.init.zeros_(twin.conv.weight)
    nn.init.zeros_(twin.conv.bias)
    assert not torch.equal(twin(IMAGES), net(IMAGES))
    assert_close([net(IMAGES)], [running(fast, net)], 1e-4)


def test_linear_layers_are_cast_once_under_autocast_and_only_there():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8, bias=False)), nn.Linear(8, 2))
    model[:2].requires_grad_(False)
    x = torch.randn(3, 8)
    assert FastPrefix.build(model, ("0", "1"), batch_of(x)) is None
    fast = FastPrefix.build(model, ("0", "1"), batch_of(x, autocast=True))
    assert fast.num_cast == 2 and fast.error == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), running(fast, model, x))
    assert torch.equal(model(x), running(fast, model, x)), "without autocast, the weights are those of training"
    with torch.no_grad():
        model[0].weight.add_(1)
    assert fast.is_stale()


def test_autocast_switched_off_inside_the_model_is_respected():
    class Careful(Net):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    net = Careful()
    fast = build(net, autocast=True)
    assert fast.num_folded == 2 and fast.error < 1e-5


def test_weights_in_bfloat16_are_folded_in_it():
    net = Net().bfloat16()
    fast = FastPrefix.build(net, ROOTS, batch_of(IMAGES.bfloat16()))
    assert fast.num_folded == 2 and 0 < fast.error <= 4 * UNIT_BF16
    assert running(fast, net, IMAGES.bfloat16()).dtype == torch.bfloat16


def test_inputs_that_need_a_gradient_get_theirs():
    net = Net()
    fast = build(net)
    gradients = []
    for context in (nullcontext(), fast.running()):
        images = IMAGES.clone().requires_grad_()
        with context:
            result = net(images)
        result.square().sum().backward()
        gradients.append(images.grad)
    assert_close(gradients[:1], gradients[1:], 1e-4)


def test_a_wrong_fold_is_found_and_left_out(monkeypatch):
    net = Net()
    fuse = folding.fuse_conv_bn_weights

    def wrong(weight, *others):
        fused, bias = fuse(weight, *others)
        return (fused * 1.01, bias) if weight.shape == net.conv.weight.shape else (fused, bias)

    monkeypatch.setattr(folding, "fuse_conv_bn_weights", wrong)
    for autocast in (False, True):
        assert build(net, autocast=autocast).num_folded == 1


def test_a_result_without_tensors_shows_nothing_so_nothing_is_done():
    class Opaque(Net):
        def forward(self, x):
            super().forward(x)
            return object()

    assert build(Opaque()) is None


def test_an_error_of_the_model_is_its_own():
    with pytest.raises(RuntimeError):
        FastPrefix.build(Net(), ROOTS, batch_of(torch.randn(2, 5, 8, 8)))


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        net = Net()
        self.stage, self.head = nn.Sequential(net.conv, net.norm, nn.ReLU()), net.head

    def forward(self, x):
        return self.head(self.stage(x))


@pytest.mark.parametrize("fails", ["at once", "when called", "not"])
def test_compiling_falls_back_wherever_it_fails(fails, monkeypatch):
    calls = []

    def compile(forward):
        if fails == "at once":
            raise RuntimeError("no compiler")

        def compiled(*args):
            calls.append(args)
            if fails == "when called":
                raise RuntimeError("no compiler")
            return forward(*args)

        return compiled

    monkeypatch.setattr(torch, "compile", compile)
    model = Stage()
    fast = FastPrefix.build(model, ("stage",), batch_of(IMAGES), compile=True)
    assert fast.num_folded == 1
    assert fast.is_compiled == (fails == "not") and bool(calls) == (fails != "at once")
    assert_close([model(IMAGES)], [running(fast, model)], 1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_roots_compute_the_same():
    model = Stage()
    fast = FastPrefix.build(model, ("stage",), batch_of(IMAGES), compile=True)
    assert fast.is_compiled
    plain = model(IMAGES)
    assert_close([plain], [running(fast, model)], 1e-4)
    assert "forward" not in vars(model.stage)
