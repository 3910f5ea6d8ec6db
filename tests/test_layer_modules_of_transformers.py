"""Where the models of Hugging Face transformers are cut."""

import pytest
import torch

from cuts import check_partition, cut, numbered, on_meta, run_order
from egeria.layers.modules import find_atoms, parse_modules

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[3, 4, 5, 6]])
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


def clip():
    size = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 6}
    text, vision = {**size, **SMALL}, {**size, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def swin():
    size = {"image_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 8}
    config = transformers.SwinConfig(**size, depths=[2, 2, 6, 2], num_heads=[1, 2, 4, 8])
    return transformers.SwinForImageClassification(config)


def hf_resnet():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[3, 4, 6, 3])
    return transformers.ResNetForImageClassification(config)


def mixtral():
    size = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**size, num_hidden_layers=4, **SMALL))


def bert_to_bert():
    small = bert("BertModel", depth=3).config
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(small, small)
    return transformers.EncoderDecoderModel(config)


TWELVE = ["0-{}.2", "3-{}.5", "6-{}.7", "8-{}.9"]


def names_of_twelve(prefix):
    """Twelve equal layers without a vocabulary: 3 + 3 + 2 + 2 + 1 and the last one."""
    return [*(f"{prefix}.{part.format(prefix)}" for part in TWELVE), f"{prefix}.10", f"{prefix}.11"]


def test_bert():
    model = bert()
    order = run_order(model, lambda: model(TOKENS))
    modules = cut(model, order=order)
    layers = "bert.encoder.layer"
    assert modules == cut(model)
    assert list(modules) == names_of_twelve(layers)
    assert modules[f"{layers}.0-{layers}.2"] == ["bert.embeddings", *numbered(layers, 0, 3)]
    assert modules[f"{layers}.11"] == [f"{layers}.11", "bert.pooler", "dropout", "classifier"]


def test_bert_with_tied_head():
    modules = parse_modules(bert("BertForMaskedLM"))
    assert modules[0].shared_parameters == ("bert.embeddings.word_embeddings.weight",)
    assert not any(module.shared_parameters for module in modules[1:])
    assert modules[-1].submodules == ("bert.encoder.layer.11", "cls")


@pytest.mark.parametrize("size", [{}, {"vocab_size": 250_000}], ids=["usual vocabulary", "huge vocabulary"])
def test_the_vocabulary_has_no_say_in_the_cut(size):
    model = on_meta(lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)))
    assert list(cut(model)) == names_of_twelve("transformer.h")


def test_gpt2():
    model = gpt2()
    order = run_order(model, lambda: model(TOKENS))
    modules = cut(model, order=order)
    layers = "transformer.h"
    assert modules == cut(model)
    assert list(modules) == names_of_twelve(layers)
    stem = ["transformer.wte", "transformer.wpe", "transformer.drop"]
    assert modules[f"{layers}.0-{layers}.2"] == [*stem, *numbered(layers, 0, 3)]
    assert modules[f"{layers}.11"] == [f"{layers}.11", "transformer.ln_f", "lm_head"]
    assert parse_modules(model, order=order)[0].shared_parameters == ("transformer.wte.weight",)


def test_vit():
    model = vit()
    order = run_order(model, lambda: model(torch.randn(1, 3, 8, 8)))
    modules = cut(model, order=order)
    layers = "vit.layers"
    assert modules == cut(model)
    assert list(modules) == names_of_twelve(layers)
    assert modules[f"{layers}.0-{layers}.2"] == ["vit.embeddings", *numbered(layers, 0, 3)]
    assert modules[f"{layers}.11"] == [f"{layers}.11", "vit.layernorm", "classifier"]


@pytest.mark.parametrize("build", [bart, marian])
def test_bart_and_marian(build):
    model = build()
    order = run_order(model, lambda: model(input_ids=TOKENS, decoder_input_ids=TOKENS))
    modules = parse_modules(model, order=order)
    check_partition(model, modules)
    front, back = "model.encoder.layers", "model.decoder.layers"
    blocks = [name for module in modules for name in module.submodules if name.startswith((front, back))]
    assert blocks == [*numbered(front, 0, 6), *numbered(back, 0, 6)]
    assert [module.tap for module in modules] == [
        *(f"{front}.2", f"{front}.5"),
        *(f"{back}.1", f"{back}.3", f"{back}.4", f"{back}.5"),
    ]
    assert {"model.shared", "model.encoder.embed_tokens"} <= set(modules[0].submodules)
    assert "model.decoder.embed_tokens" in modules[2].submodules
    assert modules[0].shared_parameters == ("model.shared.weight",)
    assert modules[-1].submodules[-1] == "lm_head"


def test_t5():
    model = t5()
    order = run_order(model, lambda: model(input_ids=TOKENS, decoder_input_ids=TOKENS))
    modules = parse_modules(model, order=order)
    check_partition(model, modules)
    assert [list(module.submodules) for module in modules] == [
        ["shared", "encoder.embed_tokens", *numbered("encoder.block", 0, 3)],
        numbered("encoder.block", 3, 6),
        ["encoder.final_layer_norm", "encoder.dropout", "decoder.embed_tokens", *numbered("decoder.block", 0, 2)],
        numbered("decoder.block", 2, 4),
        ["decoder.block.4"],
        ["decoder.block.5", "decoder.final_layer_norm", "decoder.dropout", "lm_head"],
    ]
    assert modules[0].shared_parameters == ("shared.weight",)


def test_clip_has_the_layers_of_both_towers_as_atoms():
    names = [atom.name for atom in find_atoms(clip())]
    assert names == [*numbered("text_model.encoder.layers", 0, 6), *numbered("vision_model.encoder.layers", 0, 6)]


def test_swin_and_resnet_are_cut_at_their_stages():
    stages = [(0, 2), (1, 2), (2, 6), (3, 2)]
    expected = [f"swin.encoder.layers.{stage}.blocks.{i}" for stage, count in stages for i in range(count)]
    assert [atom.name for atom in find_atoms(swin())] == expected
    assert cut(swin())["swin.encoder.layers.1.blocks"][0] == "swin.encoder.layers.0.downsample"
    stages = [(0, 3), (1, 4), (2, 6), (3, 3)]
    expected = [f"resnet.encoder.stages.{stage}.layers.{i}" for stage, count in stages for i in range(count)]
    assert [atom.name for atom in find_atoms(hf_resnet())] == expected


def test_mixtral_keeps_its_experts_inside_the_blocks():
    assert [atom.name for atom in find_atoms(mixtral())] == numbered("model.layers", 0, 4)


def test_two_bert_have_their_layers_and_not_their_embeddings_as_atoms():
    names = [atom.name for atom in find_atoms(bert_to_bert())]
    assert names == [*numbered("encoder.encoder.layer", 0, 3), *numbered("decoder.bert.encoder.layer", 0, 3)]


@pytest.mark.parametrize("build", [bert, bart, marian, t5, gpt2, vit, clip, swin, hf_resnet, mixtral, bert_to_bert])
def test_every_parameter_is_in_exactly_one_module(build):
    model = on_meta(build)
    check_partition(model, parse_modules(model))
    check_partition(model, parse_modules(model, pattern=r".*\.(layers?|h|block|blocks)\.\d+"))
