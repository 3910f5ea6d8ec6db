"""Where models are cut: the exact submodules of each layer module, in the order of definition."""

import pytest
import torch
from benchmarks.models.convnets import mobilenet_v2, resnet50
from benchmarks.models.segmentation import deeplabv3
from examples.resnet import cifar_resnet
from torch import nn

from egeria.errors import UnsupportedModelError
from egeria.model.cut import make_modules
from egeria.model.group import group_atoms


def cut(model, **options):
    """The submodules of each layer module, by its name, before a pass; each parameter is in exactly one of them."""
    modules = make_modules(model, **options)
    parameters = [name for module in modules for name in module.parameters]
    assert sorted(parameters) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert sum(module.num_parameters for module in modules) == sum(p.numel() for p in model.parameters())
    assert sum(module.share for module in modules) == pytest.approx(1)
    assert all(module.tap in module.submodules and module.reason.endswith(".") for module in modules)
    return {module.name: list(module.submodules) for module in modules}


def numbered(prefix, start, stop):
    return [f"{prefix}.{i}" for i in range(start, stop)]


def on_meta(build, *arguments, **options):
    with torch.device("meta"):
        return build(*arguments, **options)


def blocks_of(model):
    """The blocks of a model: one layer module each, however small."""
    return [module.tap for module in make_modules(model, target_share=1e-9, minimum_share=1e-12)]


# --- convolutional networks ---


def test_resnet56_is_cut_into_the_seven_modules_of_figure_11():
    modules = make_modules(cifar_resnet(56))
    assert {module.name: list(module.submodules) for module in modules} == {
        "layer1": ["conv1", "bn1", *numbered("layer1", 0, 9)],
        "layer2": numbered("layer2", 0, 9),
        "layer3.0-layer3.2": numbered("layer3", 0, 3),
        "layer3.3-layer3.4": numbered("layer3", 3, 5),
        "layer3.5-layer3.6": numbered("layer3", 5, 7),
        "layer3.7": ["layer3.7"],
        "layer3.8": ["layer3.8", "linear"],
    }
    assert [module.tap for module in modules][:4] == ["layer1.8", "layer2.8", "layer3.2", "layer3.4"]
    assert [module.reason for module in modules[1:4]] == [
        "Another stage begins at layer2.0.",
        "Another stage begins at layer3.0; part 1 of 4 of a stage with 76% of the parameters.",
        "Part 2 of 4 of a stage with 76% of the parameters.",
    ]


def test_resnet50_mobilenet_and_deeplab():
    assert list(cut(on_meta(resnet50))) == ["layer1", "layer2", "layer3", "layer4.0", "layer4.1", "layer4.2"]
    model = on_meta(mobilenet_v2)
    assert blocks_of(model) == numbered("features", 1, 18)
    assert cut(model) == {
        "features.1-features.7": numbered("features", 0, 8),
        "features.8-features.14": numbered("features", 8, 15),
        "features.15-features.16": numbered("features", 15, 17),
        "features.17": ["features.17", "features.18", "classifier"],
    }
    modules = cut(on_meta(deeplabv3))
    assert list(modules) == [
        *("backbone.layer1", "backbone.layer2", "backbone.layer3"),
        *("backbone.layer4.0", "backbone.layer4.1", "backbone.layer4.2"),
    ]
    assert modules["backbone.layer4.2"] == ["backbone.layer4.2", *numbered("classifier", 0, 3)]


# --- transformers ---


def test_torch_transformer_has_encoder_before_decoder():
    assert cut(on_meta(nn.Transformer, batch_first=True)) == {
        "encoder.layers.0-encoder.layers.2": numbered("encoder.layers", 0, 3),
        "encoder.layers.3-encoder.layers.5": numbered("encoder.layers", 3, 6),
        "decoder.layers.0-decoder.layers.1": ["encoder.norm", *numbered("decoder.layers", 0, 2)],
        "decoder.layers.2-decoder.layers.3": numbered("decoder.layers", 2, 4),
        "decoder.layers.4": ["decoder.layers.4"],
        "decoder.layers.5": ["decoder.layers.5", "decoder.norm"],
    }


# --- models of Hugging Face ---

TWELVE = {"0-{}.2": (0, 3), "3-{}.5": (3, 6), "6-{}.7": (6, 8), "8-{}.9": (8, 10), "10": (10, 11), "11": (11, 12)}
"""Twelve equal layers without a vocabulary: 3 + 3 + 2 + 2 + 1 and the last one."""
HUGGING_FACE = {
    "Bert": ("bert.encoder.layer", ["bert.embeddings"], ["bert.pooler", "dropout", "classifier"]),
    "ViT": ("vit.layers", ["vit.embeddings"], ["vit.layernorm", "classifier"]),
    "GPT2": (
        "transformer.h",
        [f"transformer.{name}" for name in ("wte", "wpe", "drop")],
        ["transformer.ln_f", "lm_head"],
    ),
}
HEADS = {"Bert": "ForSequenceClassification", "ViT": "ForImageClassification", "GPT2": "LMHeadModel"}


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_bert_gpt2_and_vit_have_six_layer_modules_whatever_their_vocabulary(kind):
    transformers = pytest.importorskip("transformers")
    layers, stem, head = HUGGING_FACE[kind]
    parts = {f"{layers}.{name.format(layers)}": numbered(layers, *bounds) for name, bounds in TWELVE.items()}
    parts[f"{layers}.0-{layers}.2"][:0], parts[f"{layers}.11"][len(layers) :] = stem, head
    for vocabulary in (100, 250_000):
        config = getattr(transformers, f"{kind}Config")(**({} if kind == "ViT" else {"vocab_size": vocabulary}))
        assert cut(on_meta(getattr(transformers, kind + HEADS[kind]), config)) == parts


@pytest.mark.parametrize("kind", ["Bart", "T5"])
def test_encoders_come_before_decoders(kind):
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, f"{kind}ForConditionalGeneration")
    modules = cut(on_meta(model, getattr(transformers, f"{kind}Config")(decoder_start_token_id=0)))
    layers = ("encoder.block", "decoder.block") if kind == "T5" else ("model.encoder.layers", "model.decoder.layers")
    blocks = [name for names in modules.values() for name in names if name.startswith(layers)]
    count = len(blocks) // 2
    assert count >= 6 and blocks == [name for layer in layers for name in numbered(layer, 0, count)]
    assert list(modules.values())[-1][-1] == "lm_head"


# --- tables, and the caller's own cut ---


def test_a_pattern_makes_each_outermost_match_a_module():
    assert cut(cifar_resnet(20), pattern=r"layer\d(\.2)?") == {
        "layer1": ["conv1", "bn1", "layer1"],
        "layer2": ["layer2"],
        "layer3": ["layer3", "linear"],
    }
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert cut(model, pattern=r"\d") == {"0": ["0"], "2": ["1", "2"]}, "what cannot freeze is passed over"


def test_a_pattern_with_fewer_than_two_matches_is_refused():
    for pattern in ["layer9", "layer1", "layer", ""]:
        with pytest.raises(UnsupportedModelError, match="named_modules"):
            make_modules(cifar_resnet(8), pattern=pattern)


def test_models_that_cannot_be_cut_are_refused():
    for model, found in [
        (nn.Sequential(nn.ReLU(), nn.Flatten()), "found none"),
        (nn.Linear(3, 3), "found \\[\\]"),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "found \\['0'\\]"),
        (nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), "found lazy ones"),
    ]:
        with pytest.raises(UnsupportedModelError, match=found):
            make_modules(model)


# --- grouping ---


def groups(sizes, names=None, **options):
    settings = {"target_share": 0.2, "minimum_share": 0.005, **options}
    names = names or numbered("layers", 0, len(sizes))
    return [group[:2] for group in group_atoms(names, sizes, sum(sizes), **settings)]


def test_small_stages_join_the_one_behind_them_or_before_them_at_the_end():
    assert groups([1, 500, 500, 4], target_share=0.4) == [(0, 2), (2, 3), (3, 4)]
    assert groups([1, 2, 4, 8], minimum_share=1.0, target_share=1.0) == [(0, 3), (3, 4)]
