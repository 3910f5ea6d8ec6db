"""Families of models: each freezes by a plan as by hand, to the last bit; docs/frameworks.md has the table."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import egeria
from egeria.events import FaultCaught, PlasticityRead, ReadingDropped
from loops import FAST
from twins import PLANS, Program, Twin, check_by_hand

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore::egeria.EgeriaWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
WORDS, ROWS = 40, 4
SIZES = {"hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 32}


def random(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def words(number: int, length: int = 6) -> Tensor:
    return torch.randint(3, WORDS, (ROWS, length), generator=random(number))


def images(number: int, side: int = 16) -> Tensor:
    return torch.randn(ROWS, 3, side, side, generator=random(number))


def classes(number: int, count: int = 2) -> Tensor:
    return torch.randint(0, count, (ROWS,), generator=random(number + 1000))


def of(kind: str, loss: Any, **config: Any) -> dict[str, Any]:
    """Return a program's model and pass: a class of transformers, with the fields of its configuration."""
    model = getattr(transformers, kind)
    return {"build": lambda: model(model.config_class(**config)), "loss": loss}


def causal(model: Any, number: int) -> Tensor:
    return model(input_ids=words(number), labels=words(number)).loss


def sorts_words(model: Any, number: int) -> Tensor:
    return model(input_ids=words(number), labels=classes(number)).loss


def sorts_images(model: Any, number: int) -> Tensor:
    return model(pixel_values=images(number), labels=classes(number)).loss


def clip(model: Any, number: int) -> Tensor:
    return model(input_ids=words(number), pixel_values=images(number), return_loss=True).loss


def whisper(model: Any, number: int) -> Tensor:
    return model(input_features=torch.randn(ROWS, 8, 32, generator=random(number)), labels=words(number)).loss


def convnext(model: Any, number: int) -> Tensor:
    return model(pixel_values=images(number, 32), labels=classes(number)).loss


def segformer(model: Any, number: int) -> Tensor:
    labels = torch.randint(0, 2, (ROWS, 8, 8), generator=random(number))
    return model(pixel_values=images(number, 32), labels=labels).loss


def router(model: Any, number: int) -> Tensor:
    return model(input_ids=words(number), labels=words(number), output_router_logits=True).loss


BERT = {**SIZES, "vocab_size": WORDS}
GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 5, "n_head": 2, "n_positions": 16}
BART = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
}  # fmt: skip


def always(_tap: str, _step: int) -> bool:
    return True


def in_encoder(tap: str, _step: int) -> bool:
    return "encoder" in tap


T5 = {
    "vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "GPT-2": Program(**of("GPT2LMHeadModel", causal, **GPT2), detaches=always),
    "T5": Program(**of("T5ForConditionalGeneration", causal, **T5), detaches=in_encoder),
    "BART": Program(**of("BartForConditionalGeneration", causal, **BART), detaches=in_encoder),
    "Whisper": Program(
        **of("WhisperForConditionalGeneration", whisper, **BART | {"max_position_embeddings": None},
             num_mel_bins=8, max_source_positions=16, max_target_positions=16, pad_token_id=0,
             decoder_start_token_id=1, bos_token_id=1, eos_token_id=2),
        detaches=always,
    ),
    "CLIP": Program(
        **of("CLIPModel", clip, projection_dim=16, text_config={**SIZES, "vocab_size": WORDS, "eos_token_id": 2},
             vision_config={**SIZES, "image_size": 16, "patch_size": 8}),
    ),
    "MPNet": Program(**of("MPNetForSequenceClassification", sorts_words, **BERT)),
    "Mixtral": Program(
        **of("MixtralForCausalLM", router, **BERT, num_key_value_heads=2, num_local_experts=2,
             router_aux_loss_coef=0.1)
    ),
    "Segformer": Program(
        **of("SegformerForSemanticSegmentation", segformer, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1],
             num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16, num_labels=2)
    ),
    "ViT": Program(**of("ViTForImageClassification", sorts_images, **SIZES, image_size=16, patch_size=8)),
    "ConvNeXt": Program(
        **of("ConvNextForImageClassification", convnext, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 2, 1],
             num_labels=2, drop_path_rate=0.1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_it_freezes_as_by_hand(name, tmp_path):
    check_by_hand(FAMILIES[name], tmp_path, PLANS[0]).run.close()


# --- checkpoints, adapters, several tasks and optimizers --------------------------------------------------------------


def checkpointed(kind: str, *, is_reentrant: bool = False, lora: tuple[str, ...] = (), **config: Any) -> dict[str, Any]:
    """Return what a program needs of a model that recomputes its blocks, with or without adapters."""

    def build() -> nn.Module:
        model = getattr(transformers, kind)
        made = model(model.config_class(**config))
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
        if lora:
            made.enable_input_require_grads()
            settings = peft.LoraConfig(r=2, target_modules=[*lora], lora_dropout=0.1, fan_in_fan_out="n_embd" in config)
            made = peft.get_peft_model(made, settings)
        return made

    return {"build": build, "detaches": always}


def uncached(model: Any, number: int) -> Tensor:
    return model(input_ids=words(number), labels=words(number), use_cache=False).loss


CHECKPOINTED = {
    kind: Program(**checkpointed(name, lora=lora, **config), loss=loss)
    for kind, name, lora, config, loss in [
        ("BERT", "BertForSequenceClassification", (), BERT, sorts_words),
        ("GPT-2", "GPT2LMHeadModel", (), GPT2, uncached),
        ("LoRA on BERT", "BertForSequenceClassification", ("query", "value"), BERT, sorts_words),
        ("LoRA on Llama", "LlamaForCausalLM", ("q_proj", "v_proj"), BERT, uncached),
    ]
}


def backward_passes(model: nn.Module, names: tuple[str, ...], step: Callable[[], object]) -> int:
    """Return through how many leaves of these submodules the backward pass of a step goes."""
    passes = list[Tensor]()

    def note(_part: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(passes.append)

    parts = [part for name in names for part in model.get_submodule(name).modules() if not any(part.children())]
    handles = [part.register_forward_hook(note) for part in parts]
    step()
    for handle in handles:
        handle.remove()
    return len(passes)


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_the_backward_pass_of_a_frozen_front_does_not_run_where_blocks_are_recomputed(name, tmp_path):
    ours = check_by_hand(CHECKPOINTED[name], tmp_path, PLANS[0])
    depth = ours.run.frozen
    front, behind = (
        tuple(name for module in modules for name in module.submodules)
        for modules in (ours.run.modules[:depth], ours.run.modules[depth:])
    )
    assert backward_passes(ours.model, front, ours.update) == 0
    assert backward_passes(ours.model, behind, ours.update) > 0
    ours.run.close()
    assert backward_passes(ours.model.train(), front, ours.update) > 0


@pytest.mark.parametrize("kind, config", [("T5ForConditionalGeneration", T5), ("BartForConditionalGeneration", BART)])
def test_nor_does_that_of_a_frozen_encoder(kind, config, tmp_path):
    made = checkpointed(kind, **config) | {"detaches": in_encoder}
    ours = check_by_hand(Program(**made, loss=uncached), tmp_path, "0.2:2")
    front = tuple(
        name for module in ours.run.modules[:2] for name in module.submodules if "block" in name or "layers" in name
    )
    assert front and backward_passes(ours.model, front, ours.update) == 0
    ours.run.close()


@pytest.mark.parametrize("name", ["BERT", "ViT", *(pytest.param(n, marks=pytest.mark.slow) for n in ("GPT-2", "T5"))])
def test_its_plasticity_is_read(name, tmp_path):
    program = Program(**of("BertForSequenceClassification", sorts_words, **BERT)) if name == "BERT" else FAMILIES[name]
    given = {"config": {**FAST, "freezing": {"tolerance_share": 5.0}}, "controller": "inline", "policy": "egeria"}
    Twin(program, num_steps=24).attach(tmp_path, **given).train().run.close()
    journal = egeria.read_journal(tmp_path)
    readings = journal.of(PlasticityRead)
    assert len(readings) > 5 and all(reading.value > 0 for reading in readings)
    assert not journal.of((ReadingDropped, FaultCaught))
