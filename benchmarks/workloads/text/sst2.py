"""Telling positive from negative sentences: fine-tuning on SST-2, whole or through adapters."""

import warnings
from collections.abc import Callable, Mapping

from torch import nn

from benchmarks.workloads.text.classification import Load, classify, label_rows
from benchmarks.workloads.text.corpora import read_sentiments
from benchmarks.workloads.text.fine_tuning import Recipe
from benchmarks.workloads.text.minilm import classifier
from benchmarks.workloads.text.sampling import hold_out, sample
from benchmarks.workloads.workload import MissingDataError, Setting, Training

RANK = 8
"""Of the adapters (Hu et al., 2022, table 9)."""


def whole(model: nn.Module) -> nn.Module:
    """Train all parameters."""
    return model


def with_adapters(model: nn.Module) -> nn.Module:
    """Train low-rank changes of the query and value projections, and the classifier (LoRA, Hu et al., 2022).

    Raises:
        MissingDataError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415 (as in `minilm`)
    except ImportError as error:
        raise MissingDataError("Low-rank adapters need the package peft, not found. Run `pip install peft`.") from error
    adapters = LoraConfig(
        task_type="SEQ_CLS", r=RANK, lora_alpha=2 * RANK, lora_dropout=0.1, target_modules=["query", "value"]
    )
    with warnings.catch_warnings():
        # peft asks a model of transformers 5 by a name that is to go.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        adapted: nn.Module = get_peft_model(model, adapters)
    return adapted


def with_checkpoints(model: nn.Module) -> nn.Module:
    """Train adapters, and make what is inside of each layer again for its backward pass (Chen et al., 2016).

    Raises:
        MissingDataError: peft is not installed.
    """
    with warnings.catch_warnings():
        # The name that transformers 5.0 has, and later ones call deprecated.
        warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable`", category=FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return with_adapters(model)


def build(
    setting: Setting,
    *,
    recipes: Mapping[str, Recipe],
    load: Load = classifier,
    adapt: Callable[[nn.Module], nn.Module] = whole,
) -> Training:
    """Make a training run.

    Args:
        setting: what is asked for.
        recipes: by tier.
        load: returns the pretrained network, as `classify` takes it.
        adapt: takes the network with pretrained values, and returns what is trained.

    Raises:
        MissingDataError: the data, the weights or a package are not there.
    """
    recipe = recipes[setting.tier]
    train, judged = hold_out(read_sentiments(setting.data, "train"), recipe.num_train, recipe.num_judged)
    held_out = sample(read_sentiments(setting.data, "dev"), recipe.num_held_out)
    return classify(
        setting,
        recipe,
        train=train,
        held_out=held_out,
        judged=judged,
        num_labels=2,
        make_rows=label_rows,
        load=load,
        adapt=adapt,
    )
