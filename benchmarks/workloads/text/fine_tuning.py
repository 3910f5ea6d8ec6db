"""What fine-tuning BERT on any task has in common (Devlin et al., 2019, A.3)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import Dataset

from benchmarks.workloads.mixed import in_place_of_bfloat16, mixed
from benchmarks.workloads.text.batching import moved, pad_rows, shuffled_loader
from benchmarks.workloads.text.schedules import Schedule, linear
from benchmarks.workloads.workload import Setting, Training

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""Arguments of the network; what else a batch holds are labels."""
WARMUP_SHARE = 0.1
CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a task is fine-tuned in one tier."""

    longest: int
    """Tokens of a row."""
    num_train: int | None
    """Samples; None takes all."""
    num_held_out: int | None
    num_judged: int | None
    """Samples that the trained network is judged on, once; None takes all there are, 0 leaves it at those held out."""
    batch_size: int
    num_epochs: int
    peak_rate: float
    weight_decay: float = 0.01
    evaluations_per_epoch: int = 4


class Rows(Dataset[Any]):
    """Numbered rows with labels; batches are what a BERT of transformers takes.

    Args:
        tokens: numbers of each row [T].
        types: 0 and 1, for the first and the second sentence of each row [T].
        labels: one number for each row, by name.
    """

    def __init__(self, tokens: Sequence[Tensor], types: Sequence[Tensor], labels: Mapping[str, Tensor]) -> None:
        self.tokens = tokens
        self.types = types
        self.labels = labels

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        tokens, mask = pad_rows([self.tokens[index] for index in indices], 0)
        types, _ = pad_rows([self.types[index] for index in indices], 0)
        chosen = torch.tensor(indices)
        labels = {name: values[chosen] for name, values in self.labels.items()}
        return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": types, **labels}


def run_network(network: nn.Module, batch: dict[str, Tensor], device: torch.device) -> tuple[Any, dict[str, Tensor]]:
    """Return what the network gives for a batch, and the batch on the device."""
    inputs = moved(batch, device)
    with mixed(device):
        return network(**{name: inputs[name] for name in INPUTS}), inputs


def fine_tuning(
    setting: Setting,
    recipe: Recipe,
    *,
    model: nn.Module,
    rows: Rows,
    loss: Callable[[nn.Module, Any], Tensor],
    evaluate: Callable[[nn.Module], dict[str, float]],
    judge: Callable[[nn.Module], dict[str, float]] | None,
    schedule: Schedule = linear,
) -> Training:
    """Return the run: AdamW, a schedule with warmup, gradients clipped to norm 1.

    Args:
        setting: what is asked for.
        recipe: of the tier.
        model: with pretrained values; what requires no gradient is not trained.
        rows: to train on.
        loss: of a batch.
        evaluate: on held-out rows.
        judge: on more of them, once.
        schedule: of the learning rate.
    """
    model = model.to(setting.device)
    loader = shuffled_loader(rows, rows.lengths, recipe.batch_size, setting.seed)
    total_steps = len(loader) * recipe.num_epochs
    optimizer = AdamW(_parameter_groups(model, recipe.weight_decay), lr=recipe.peak_rate, fused=True)
    return Training(
        model=model,
        loader=loader,
        optimizer=optimizer,
        scheduler=schedule(optimizer, round(WARMUP_SHARE * total_steps), total_steps),
        num_epochs=recipe.num_epochs,
        loss=loss,
        evaluate=evaluate,
        judge=judge,
        clip_norm=CLIP_NORM,
        number_format=in_place_of_bfloat16(setting.device),
        evaluations_per_epoch=recipe.evaluations_per_epoch,
    )


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Keep biases and normalisations from decaying."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
