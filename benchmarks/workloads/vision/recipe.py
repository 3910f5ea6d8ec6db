"""The numbers a vision workload trains by in one tier."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR

from benchmarks.workloads.text.schedules import cosine


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """SGD with momentum, or AdamW, on random crops and flips."""

    num_train: int
    """Training pictures."""
    num_held_out: int
    """Pictures the metric is taken on."""
    num_judged: int = 0
    """Pictures that the trained network is judged on, once; 0 leaves it at those held out."""
    size: tuple[int, int]
    """Height and width of the pictures, in pixels; held-out ones are seen whole."""
    crop: tuple[int, int]
    """Height and width of the crops trained on, in pixels."""
    padding: int = 0
    """Black pixels around a picture before it is cropped."""
    width: float = 1.0
    """Channels of the network, as a share of those in the literature."""
    num_epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    momentum: float = 0.9
    is_adamw: bool = False
    """Whether AdamW takes the place of SGD; weight decay is its own then."""
    warmup: float = 0.0
    """Share of the run in which the rate rises, before `warm_cosine_schedule` falls."""
    is_mixed: bool = True
    """Whether the forward pass is autocast to bfloat16."""
    decays: tuple[float, ...] = (1 / 2, 3 / 4)
    """Shares of the run after which the step schedule divides the learning rate by ten."""


def make_optimizer(network: nn.Module, recipe: Recipe) -> Optimizer:
    """Return the optimizer of a recipe."""
    if recipe.is_adamw:
        return AdamW(network.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    return SGD(network.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)


def step_schedule(optimizer: Optimizer, recipe: Recipe, num_steps: int) -> LRScheduler:
    """Return the schedule that falls tenfold at each decay."""
    return MultiStepLR(optimizer, [round(share * num_steps) for share in recipe.decays], gamma=0.1)


def cosine_schedule(optimizer: Optimizer, recipe: Recipe, num_steps: int) -> LRScheduler:
    """Return the schedule that falls to zero along half a cosine."""
    return CosineAnnealingLR(optimizer, T_max=num_steps)


def linear_schedule(optimizer: Optimizer, recipe: Recipe, num_steps: int) -> LRScheduler:
    """Return the schedule that falls to zero along a line."""
    return LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=num_steps)


def warm_cosine_schedule(optimizer: Optimizer, recipe: Recipe, num_steps: int) -> LRScheduler:
    """Return the schedule that rises along a line and falls to zero along half a cosine."""
    return cosine(optimizer, round(recipe.warmup * num_steps), num_steps)


Schedule = Callable[[Optimizer, Recipe, int], LRScheduler]
SCHEDULES: dict[str, Schedule] = {"": step_schedule, "-cosine": cosine_schedule}
"""By the ending of a workload's name."""
