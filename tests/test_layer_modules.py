"""Where models are cut: the exact submodules of each layer module."""

from __future__ import annotations

import itertools

import pytest
import torch
from benchmarks.models.convnets import mobilenet_v2, resnet50
from benchmarks.models.segmentation import deeplabv3, unet
from examples.resnet import cifar_resnet
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cuts import check_partition, cut, numbered, on_meta, run_order
from egeria.errors import ConfigError, UnsupportedModelError
from egeria.layers.atoms import group_atoms, split_evenly
from egeria.layers.freezing import Freezer
from egeria.layers.modules import LayerModule, find_atoms, parse_modules

# --- convolutional networks ---


def test_resnet56_is_cut_into_the_seven_modules_of_figure_11():
    modules = parse_modules(cifar_resnet(56))
    assert {module.name: list(module.submodules) for module in modules} == {
        "layer1": ["conv1", "bn1", *numbered("layer1", 0, 9)],
        "layer2": numbered("layer2", 0, 9),
        "layer3.0-layer3.2": numbered("layer3", 0, 3),
        "layer3.3-layer3.4": numbered("layer3", 3, 5),
        "layer3.5-layer3.6": numbered("layer3", 5, 7),
        "layer3.7": ["layer3.7"],
        "layer3.8": ["layer3.8", "linear"],
    }
    assert [module.tap for module in modules] == [
        *("layer1.8", "layer2.8", "layer3.2", "layer3.4", "layer3.6", "layer3.7", "layer3.8")
    ]
    assert [module.reason for module in modules[1:4]] == [
        "Another stage begins at layer2.0.",
        "Another stage begins at layer3.0; part 1 of 4 of a stage with 76% of the parameters.",
        "Part 2 of 4 of a stage with 76% of the parameters.",
    ]


@pytest.mark.parametrize("shortcut", ["pad", "project"])
def test_resnet20_and_resnet8(shortcut):
    assert cut(cifar_resnet(20, shortcut=shortcut)) == {
        "layer1": ["conv1", "bn1", *numbered("layer1", 0, 3)],
        "layer2": numbered("layer2", 0, 3),
        "layer3.0": ["layer3.0"],
        "layer3.1": ["layer3.1"],
        "layer3.2": ["layer3.2", "linear"],
    }
    assert cut(cifar_resnet(8, shortcut=shortcut)) == {
        "layer1.0": ["conv1", "bn1", "layer1.0"],
        "layer2.0": ["layer2.0"],
        "layer3.0": ["layer3.0", "linear"],
    }


def test_resnet50():
    model = on_meta(resnet50)
    assert len(find_atoms(model)) == 16
    assert cut(model) == {
        "layer1": ["conv1", "bn1", "maxpool", *numbered("layer1", 0, 3)],
        "layer2": numbered("layer2", 0, 4),
        "layer3": numbered("layer3", 0, 6),
        "layer4.0": ["layer4.0"],
        "layer4.1": ["layer4.1"],
        "layer4.2": ["layer4.2", "fc"],
    }


def test_mobilenet_v2_is_cut_where_its_flat_list_of_blocks_grows():
    model = on_meta(mobilenet_v2)
    assert [atom.name for atom in find_atoms(model)] == numbered("features", 1, 18)
    assert cut(model) == {
        "features.1-features.7": numbered("features", 0, 8),
        "features.8-features.14": numbered("features", 8, 15),
        "features.15-features.16": numbered("features", 15, 17),
        "features.17": ["features.17", "features.18", "classifier"],
    }


def test_deeplabv3_keeps_its_pyramid_in_the_last_module():
    modules = cut(on_meta(deeplabv3))
    assert list(modules) == [
        *("backbone.layer1", "backbone.layer2", "backbone.layer3"),
        *("backbone.layer4.0", "backbone.layer4.1", "backbone.layer4.2"),
    ]
    assert modules["backbone.layer4.2"] == ["backbone.layer4.2", *numbered("classifier", 0, 3)]


def test_unet_is_cut_in_execution_order():
    model = unet(width=8)
    order = run_order(model, lambda: model(torch.randn(1, 1, 16, 16)))
    assert cut(model)["decoders.0"] == [*numbered("upsamplers", 0, 3), "decoders.0"]
    assert cut(model, order=order) == {
        "encoders.0": ["encoders.0"],
        "encoders.1": ["encoders.1"],
        "encoders.2": ["encoders.2"],
        "bottleneck": ["bottleneck"],
        "decoders.0": ["upsamplers.0", "decoders.0"],
        "decoders.1": ["upsamplers.1", "decoders.1"],
        "decoders.2": ["upsamplers.2", "decoders.2", "classifier"],
    }


# --- plain networks: units are atoms ---


def test_each_linear_of_a_plain_sequence_is_an_atom():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 8))
    assert cut(model) == {"0": ["0"], "2": ["1", "2"], "5": ["3", "4", "5"]}


def test_normalisation_joins_the_unit_in_front_and_is_its_tap():
    model = nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()
    )
    assert cut(model) == {"1": ["0", "1", "2"], "4": ["3", "4", "5"]}
    assert [module.tap for module in parse_modules(model)] == ["2", "4"]


def test_composites_without_repetition_are_taken_apart_but_not_those_of_torch():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.attention = nn.MultiheadAttention(8, 2)
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(self.attention(*[self.embed(x)] * 3)[0])

    model = nn.Sequential(Encoder(), nn.LSTM(8, 8))
    assert cut(model) == {"0.embed": ["0.embed"], "0.attention": ["0.attention", "0.norm"], "1": ["1"]}


def test_parametrized_layers_are_not_taken_apart():
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(3)]
    assert cut(nn.Sequential(*layers)) == {"0": ["0"], "1": ["1"], "2": ["2"]}


# --- transformers ---


class Transformer(nn.Module):
    """Tokens and positions as parameters of the model itself, blocks of torch, a head."""

    def __init__(self, depth=6, width=8):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, 5, width))
        self.patch = nn.Conv1d(3, width, 2, 2)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.patch(x).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.encoder(x)[:, 0])


def test_direct_parameters_belong_to_the_module_of_the_first_atom_behind_them():
    modules = parse_modules(Transformer())
    check_partition(Transformer(), modules)
    assert modules[0].parameters[:4] == ("token", "position", "patch.weight", "patch.bias")
    assert list(modules[0].submodules) == ["patch", *numbered("encoder.layers", 0, 2)]
    assert list(modules[-1].submodules) == ["encoder.layers.5", "head"]


def test_two_towers_of_one_class_are_stages_and_their_layers_the_atoms():
    model = nn.ModuleDict({"left": Transformer(), "right": Transformer()})
    names = [atom.name for atom in find_atoms(model)]
    assert names == [*numbered("left.encoder.layers", 0, 6), *numbered("right.encoder.layers", 0, 6)]
    modules = parse_modules(model)
    check_partition(model, modules)
    first_right = next(m for m in modules if "right.patch" in m.submodules)
    assert {"right.token", "right.position", "left.head.weight"} <= set(first_right.parameters)


def test_torch_transformer_has_encoder_before_decoder():
    assert cut(on_meta(nn.Transformer, batch_first=True)) == {
        "encoder.layers.0-encoder.layers.2": numbered("encoder.layers", 0, 3),
        "encoder.layers.3-encoder.layers.5": numbered("encoder.layers", 3, 6),
        "decoder.layers.0-decoder.layers.1": ["encoder.norm", *numbered("decoder.layers", 0, 2)],
        "decoder.layers.2-decoder.layers.3": numbered("decoder.layers", 2, 4),
        "decoder.layers.4": ["decoder.layers.4"],
        "decoder.layers.5": ["decoder.layers.5", "decoder.norm"],
    }


def test_experts_inside_a_block_do_not_make_it_a_stage():
    class Expert(nn.Sequential):
        pass

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.out, self.router = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 4)
            self.experts = nn.ModuleList(Expert(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4))

        def forward(self, x):
            return x

    model = nn.Sequential(nn.Linear(3, 8), Block(), Block(), nn.Linear(8, 2))
    assert cut(model) == {"1": ["0", "1"], "2": ["2", "3"]}


# --- sharing ---


def test_tied_weights_belong_to_the_first_user_and_are_named_as_shared():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return x

    modules = parse_modules(Tied())
    check_partition(Tied(), modules)
    assert [module.shared_parameters for module in modules] == [("embed.weight",), (), (), ()]
    assert modules[-1].parameters == () and modules[-1].submodules == ("head",)


def test_a_submodule_under_two_names_is_shared_by_what_lies_between():
    class Repeating(nn.Module):
        def __init__(self):
            super().__init__()
            block, other = (nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))
            self.chain = nn.Sequential(block, other, block)

        def forward(self, x):
            return self.chain(x)

    modules = parse_modules(Repeating())
    check_partition(Repeating(), modules)
    assert [module.submodules for module in modules] == [("chain.0",), ("chain.1",)]
    assert modules[0].shared_parameters == modules[0].parameters
    assert modules[1].shared_parameters == ()


def with_shared(shared, count=4):
    """Return blocks that all use one submodule, a head behind them, and what freezes them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), shared) for _ in range(count)), nn.Linear(4, 4))
    return model, Freezer(model, parse_modules(model, pattern=r"\d"))


def test_a_submodule_of_active_modules_too_keeps_its_mode_until_all_that_it_serves_is_frozen():
    dropout = nn.Dropout(0.5)
    model, freezer = with_shared(dropout)
    inputs = torch.randn(64, 4)
    for depth in (1, 2, 3):
        freezer.freeze_to(depth)
        model.train()
        model(inputs)
        assert dropout.training and not model[depth - 1][0].training
    freezer.freeze_to(4)
    model.train()
    assert (model[:4](inputs) != 0).all(), "it drops nothing any more, in the first of them neither"
    assert not dropout.training
    freezer.thaw()
    assert all(part.training for part in model.modules())


def test_statistics_of_a_norm_that_active_modules_use_too_go_on():
    norm = nn.BatchNorm1d(4)
    model, freezer = with_shared(norm)
    freezer.freeze_to(2)
    model.train()
    before = norm.running_mean.clone()
    model(torch.randn(16, 4)).sum().backward()
    assert not torch.equal(norm.running_mean, before)
    assert norm.weight.grad is not None and model[0][0].weight.grad is None
    freezer.thaw()
    assert all(part.training for part in model.modules())


def test_modules_that_share_a_submodule_thaw_into_the_mode_from_before_the_first():
    model, freezer = with_shared(nn.Dropout(0.5), count=2)
    freezer.freeze_to(2)
    assert not model[0][1].training
    freezer.thaw()
    assert all(part.training for part in model.modules())


def test_another_name_of_a_block_or_its_norm_is_no_other_use():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()) for _ in range(3)))
    order = run_order(model, lambda: model(torch.randn(8, 4)))
    model.layers, model.norm = nn.ModuleList(model[:2]), model[0][1]
    model.forward = nn.Sequential(*model[:3]).forward
    freezer = Freezer(model, parse_modules(model, pattern=r"\d", order=order))
    freezer.freeze_to(1)
    model.train()
    model(torch.randn(8, 4))
    assert not any(part.training for part in model[0].modules())
    assert all(part.training for part in model[1].modules())


# --- the caller's own cut ---


def test_a_pattern_makes_each_outermost_match_a_module():
    assert cut(cifar_resnet(20), pattern=r"layer\d(\.2)?") == {
        "layer1": ["conv1", "bn1", "layer1"],
        "layer2": ["layer2"],
        "layer3": ["layer3", "linear"],
    }
    assert cut(cifar_resnet(8), pattern=r"layer[13]\.0|bn1") == {
        "bn1": ["conv1", "bn1"],
        "layer1.0": ["layer1.0"],
        "layer3.0": ["layer2", "layer3.0", "linear"],
    }


def test_a_pattern_passes_over_what_cannot_be_frozen():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert cut(model, pattern=r"\d") == {"0": ["0"], "2": ["1", "2"]}


def test_a_pattern_with_fewer_than_two_matches_is_refused():
    for pattern in ["layer9", "layer1", "layer", ""]:
        with pytest.raises(UnsupportedModelError, match="named_modules"):
            parse_modules(cifar_resnet(8), pattern=pattern)


def test_arguments_outside_their_contract_are_refused():
    model = cifar_resnet(8)
    with pytest.raises(ConfigError, match="regular expression"):
        parse_modules(model, pattern="layer(")
    with pytest.raises(ConfigError, match="target_share"):
        parse_modules(model, target_share=0.0)
    with pytest.raises(ConfigError, match="fields"):
        LayerModule.from_dict({"name": "layer1"})


def test_models_that_cannot_be_cut_are_refused():
    for model, found in [
        (nn.Sequential(nn.ReLU(), nn.Flatten()), "found none"),
        (nn.Linear(3, 3), "found \\[\\]"),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "found \\['0'\\]"),
        (nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), "found lazy ones"),
    ]:
        with pytest.raises(UnsupportedModelError, match=found):
            parse_modules(model)


def groups(sizes, names=None, **options):
    settings = {"target_share": 0.2, "minimum_share": 0.005, **options}
    names = names or numbered("layers", 0, len(sizes))
    return [(group.start, group.stop) for group in group_atoms(names, sizes, sum(sizes), **settings)]


def test_small_stages_join_the_one_behind_them_or_before_them_at_the_end():
    assert groups([1, 500, 500, 4], target_share=0.4) == [(0, 2), (2, 3), (3, 4)]
    assert groups([1, 2, 4, 8], minimum_share=1.0, target_share=1.0) == [(0, 3), (3, 4)]


def test_alternating_sizes_are_one_stage():
    assert groups([1, 8] * 4, target_share=0.5) == [(0, 4), (4, 7), (7, 8)]


def test_blocks_that_are_wrapped_one_by_one_are_at_home_in_their_list():
    names = [f"layers.{i}.block" for i in range(6)]
    assert groups([5] * 6, names, target_share=0.5) == [(0, 3), (3, 5), (5, 6)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_splits_are_the_best_there_are(sizes, data):
    num_parts = data.draw(st.integers(1, len(sizes)))

    def cost(edges):
        bounds = itertools.pairwise([0, *edges, len(sizes)])
        return sum(sum(sizes[start:stop]) ** 2 for start, stop in bounds)

    edges = split_evenly(sizes, num_parts)
    choices = list(itertools.combinations(range(1, len(sizes)), num_parts - 1))
    best = min(map(cost, choices))
    assert tuple(edges) == max(choice for choice in choices if cost(choice) == best)


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=30), st.floats(0.01, 1), st.floats(0.001, 0.3))
def test_groups_cover_all_atoms_and_leave_the_last_alone(sizes, target_share, minimum_share):
    found = groups(sizes, target_share=target_share, minimum_share=minimum_share)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1] == (len(sizes) - 1, len(sizes)) or found[-1][1] - found[-1][0] == 1
