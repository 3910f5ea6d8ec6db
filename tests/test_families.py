"""Families of models: each freezes by a plan as by hand, to the last bit; docs/frameworks.md has the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from twins import PLANS, ByHand, Program, Twin, check_by_hand, declined, differences

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
    "T5": Program(
        **of("T5ForConditionalGeneration", causal, **T5), detaches=in_encoder,
    ),
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


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", FAMILIES)
def test_it_freezes_as_by_hand(name, plan, tmp_path):
    check_by_hand(FAMILIES[name], tmp_path, plan).run.close()


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


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_the_backward_pass_of_a_frozen_front_does_not_run_where_blocks_are_recomputed(name, plan, tmp_path):
    ours = check_by_hand(CHECKPOINTED[name], tmp_path, plan)
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


def test_reentrant_checkpoints_are_declined_with_the_way_out(tmp_path):
    made = checkpointed("BertForSequenceClassification", is_reentrant=True, lora=("query", "value"), **BERT)
    ours = Twin(Program(**made, loss=sorts_words)).attach(tmp_path, plan=PLANS[0]).train()
    (reason,) = declined(tmp_path)
    assert "use_reentrant=False" in reason and ours.run.frozen == 0
    assert differences(ByHand(ours).train().everything(), ours.everything()) == []
    ours.run.close()


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(functional.gelu(self.inner(self.norm(x)))))


class TwoTasks(nn.Module):
    """A trunk with a head and blocks of its own for each of two tasks, trained in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(Block() for _ in range(4)))
        self.tasks = nn.ModuleDict({name: nn.Sequential(Block(), nn.Linear(8, 3)) for name in ("sort", "count")})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.trunk(x)
        return {name: task(x) for name, task in self.tasks.items()}


def vectors(number: int) -> Tensor:
    return torch.randn(ROWS, 8, generator=random(number))


def both(model: Any, number: int) -> Tensor:
    outputs = model(vectors(number))
    return sum(functional.cross_entropy(output, classes(number, 3)) for output in outputs.values())


class Rounded(nn.Parameter):
    """Weights in 8 bits, as those of bitsandbytes: a class of their own, which never trains."""

    def __new__(cls, data: Tensor) -> Rounded:
        return torch.Tensor._make_subclass(cls, data, False)


class Quantized(nn.Module):
    """A linear layer with weights in 8 bits, and adapters of low rank."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__()
        weight = torch.randn(height, width) / width**0.5
        self.scale = float(weight.abs().max()) / 127
        self.weight = Rounded((weight / self.scale).round().to(torch.int8))
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, height, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).T + self.b(self.a(self.dropout(x)))


class QuantizedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)
        self.inner, self.outer = Quantized(8, 16), Quantized(16, 8)


def quantized() -> nn.Module:
    return nn.Sequential(*(QuantizedBlock() for _ in range(5)), nn.Linear(8, 3))


class Adversaries(nn.Module):
    """A generator and a discriminator in one model, with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(8, 8))
        self.discriminator = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(8, 1))

    def forward(self, x: Tensor, part: str) -> Tensor:
        return getattr(self, part)(x)


def play(model: Any, optimizers: Any, number: int) -> Tensor:
    for_generator, for_discriminator = optimizers
    made, real = model(vectors(number), "generator"), vectors(number + 100)
    loss = functional.softplus(-model(real, "discriminator")).mean()
    loss = loss + functional.softplus(model(made.detach(), "discriminator")).mean()
    for_discriminator.zero_grad()
    loss.backward()
    for_discriminator.step()
    for_generator.zero_grad()
    functional.softplus(-model(made, "discriminator")).mean().backward()
    for_generator.step()
    return loss.detach()


OTHERS = {
    "two tasks": Program(build=TwoTasks, loss=both),
    "8 bits": Program(build=quantized, loss=lambda m, n: functional.cross_entropy(m(vectors(n)), classes(n, 3))),
    "GAN": Program(
        build=Adversaries,
        loss=both,
        update=play,
        optimizers=lambda m: [torch.optim.Adam(part.parameters(), 1e-2) for part in (m.generator, m.discriminator)],
    ),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OTHERS)
def test_several_tasks_quantized_weights_and_adversaries(name, plan, tmp_path):
    deepest = 2 if name == "GAN" else None  # each optimizer keeps something to train
    check_by_hand(OTHERS[name], tmp_path, plan, deepest=deepest).run.close()
    assert all("one of the optimizers would have nothing left" in entry for entry in declined(tmp_path))
