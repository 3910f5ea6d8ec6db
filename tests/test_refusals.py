"""Models, wrappers and optimizers that cannot be frozen: each is recognised before anything is touched."""

import re

import pytest
import torch
from torch import nn

from egeria.session.checks import reason_to_decline

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*TorchScript:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft under transformers 5
]


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class DeepSpeedEngine(nn.Module):
    """Stands for the wrapper of that library, by its name."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class FullyShardedDataParallel(DeepSpeedEngine):
    """Stands for FSDP1, which needs a process group."""


def in_partitions(model):
    for parameter in model.parameters():
        parameter.ds_id = 1  # how ZeRO marks what it has partitioned
    return model


def bert(kind, **settings):
    """Return a model with what PEFT adds to it by a configuration of this kind."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=40, **sizes))
    return peft.get_peft_model(model, getattr(peft, kind)(task_type="SEQ_CLS", **settings))


def stepping_in_backward(model):
    from torch.distributed.optim import _apply_optimizer_in_backward  # noqa: PLC0415

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return model


def stepping_in_hooks(model):
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return model


def logging_hooks(model):
    norms = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda entry: norms.append(entry.grad.norm()))
    return model


def without_lr(model):
    optimizer = sgd(model)
    optimizer.param_groups[0]["lr"] = None  # as Adafactor of transformers has it
    return optimizer


def overlapping(model):
    optimizer = sgd(model)
    optimizer._overlap_with_ddp = True  # as ZeroRedundancyOptimizer has it
    return optimizer


MODELS = {
    "deepspeed": (DeepSpeedEngine, "Use fully_shard"),
    "zero3": (in_partitions, "ZeRO.*Use fully_shard"),
    "fsdp1": (FullyShardedDataParallel, "FSDP1.*Use fully_shard"),
    "data_parallel": (nn.DataParallel, "one process for each device"),
    "scripted": (torch.jit.script, "the model is a TorchScript module"),
    "lazy": (lambda model: nn.Sequential(model, nn.LazyLinear(4)), "Call it once before attach"),
    "prompts": (lambda _: bert("PromptTuningConfig", num_virtual_tokens=4), "saves nothing"),
    "steps in backward": (stepping_in_backward, r"Call optimizer.step\(\)"),
    "steps in hooks": (stepping_in_hooks, r"Call optimizer.step\(\)"),
}
OPTIMIZERS = {
    "lbfgs": (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS"),
    "no lr": (without_lr, "relative_step=False"),
    "overlapping": (overlapping, "overlap_with_ddp=True"),
}
FINE = {
    "plain": encoder,
    "lora": lambda: bert("LoraConfig", target_modules=["query", "value"]),
    "hooks": lambda: logging_hooks(encoder()),
}


@pytest.mark.parametrize("way", MODELS)
def test_a_model_that_freezing_would_break_is_declined_with_a_way_out(way):
    make, expected = MODELS[way]
    wrapped = make(encoder())
    reason = reason_to_decline(wrapped, [sgd(encoder())])
    assert reason is not None
    assert re.search(expected, reason)
    assert not reason.endswith("."), "it stands in a sentence"


def test_an_optimizer_that_freezing_would_break_is_declined():
    for make, expected in OPTIMIZERS.values():
        model = encoder()
        assert expected in reason_to_decline(model, [sgd(model), make(model)])


def test_what_can_be_frozen_is_not_declined():
    for make in FINE.values():
        model = make()
        assert reason_to_decline(model, [sgd(model)]) is None
