"""Where the models of Hugging Face transformers are cut, and how deep they freeze."""

import pytest
import torch

from cuts import cut, cut_behind, numbered, on_meta, text_of

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MARIAN = {
    **{
        f"{side}_{setting}": value
        for side in ("encoder", "decoder")
        for setting, value in (("layers", 6), ("attention_heads", 2), ("ffn_dim", 16))
    },
    **{"d_model": 8, "decoder_start_token_id": 0, "max_position_embeddings": 16, **SMALL},
}


def bert(head="BertForSequenceClassification", depth=12):
    size = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": depth}
    return getattr(transformers, head)(transformers.BertConfig(**size, **SMALL))


def bart():
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**MARIAN))


def marian():
    return transformers.MarianMTModel(transformers.MarianConfig(**MARIAN))


def t5(depth=6):
    size = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2, "num_layers": depth, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**size, **SMALL))


def gpt2():
    size = {"n_embd": 8, "n_layer": 12, "n_head": 2, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **SMALL))


def vit():
    size = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 12}
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **size))


TWELVE = ["0-{}.2", "3-{}.5", "6-{}.7", "8-{}.9"]


def names_of_twelve(prefix):
    """Twelve equal layers without a vocabulary: 3 + 3 + 2 + 2 + 1 and the last one."""
    return [*(f"{prefix}.{part.format(prefix)}" for part in TWELVE), f"{prefix}.10", f"{prefix}.11"]


PARTS_OF_TWELVE = [(0, 3), (3, 6), (6, 8), (8, 10), (10, 11), (11, 12)]


@pytest.mark.parametrize(
    ("build", "layers", "stem", "head"),
    [
        (bert, "bert.encoder.layer", ["bert.embeddings"], ["bert.pooler", "dropout", "classifier"]),
        (
            *(gpt2, "transformer.h"),
            *(["transformer.wte", "transformer.wpe", "transformer.drop"], ["transformer.ln_f", "lm_head"]),
        ),
        (vit, "vit.layers", ["vit.embeddings"], ["vit.layernorm", "classifier"]),
    ],
)
def test_bert_gpt2_and_vit_have_six_layer_modules(build, layers, stem, head):
    parts = [numbered(layers, *bounds) for bounds in PARTS_OF_TWELVE]
    parts[0], parts[-1] = [*stem, *parts[0]], [*parts[-1], *head]
    modules = cut(build())
    assert list(modules) == names_of_twelve(layers) and list(modules.values()) == parts
    found = cut_behind(build(), step_of(build))
    assert [(module.name, list(module.submodules)) for module in found.modules] == list(modules.items())


@pytest.mark.parametrize("size", [{}, {"vocab_size": 250_000}], ids=["usual vocabulary", "huge vocabulary"])
def test_the_vocabulary_has_no_say_in_the_cut(size):
    model = on_meta(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)))
    assert list(cut(model)) == names_of_twelve("transformer.h")


@pytest.mark.parametrize("build", [bart, marian, t5])
def test_encoders_and_decoders(build):
    found = cut_behind(build(), step_of(build))
    layers = ("encoder.block", "decoder.block") if build is t5 else ("model.encoder.layers", "model.decoder.layers")
    blocks = [name for module in found.modules for name in module.submodules if name.startswith(layers)]
    assert blocks == [name for layer in layers for name in numbered(layer, 0, 6)]
    front, back = layers
    taps = [f"{front}.2", f"{front}.5", *(f"{back}.{index}" for index in (1, 3, 4, 5))]
    assert [module.tap for module in found.modules] == taps
    assert found.modules[-1].submodules[-1] == "lm_head"
    shared = "shared.weight" if build is t5 else "model.shared.weight"
    assert [shared in module.parameters for module in found.modules] == [False] * 5 + [True]
    assert text_of(found.detaches) == "011000", "the decoder uses the embedding too"


# --- what the first passes say ---


def image(model, i):
    return model(pixel_values=torch.randn(2, 3, *[model.config.image_size] * 2), labels=torch.tensor([0, 1])).loss


def text(model, i):
    words = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
    is_classifier = "ForSequence" in type(model).__name__
    return model(input_ids=words, labels=torch.tensor([0, 1]) if is_classifier else words).loss


def step_of(build):
    return image if build is vit else text
