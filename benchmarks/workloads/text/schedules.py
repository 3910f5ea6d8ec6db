"""Learning rates over a run, as shares of the highest one."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def inverse_square_root(optimizer: Optimizer, warmup_steps: int) -> LambdaLR:
    """Rise linearly to the optimizer's rate, then fall with one over the root of the step (Vaswani et al., §5.3).

    Args:
        optimizer: its learning rate is the highest one.
        warmup_steps: the step that has the highest rate.
    """

    def share(step: int) -> float:
        return float(min((step + 1) / warmup_steps, (warmup_steps / (step + 1)) ** 0.5))

    return LambdaLR(optimizer, share)


def linear(optimizer: Optimizer, warmup_steps: int, total_steps: int) -> LambdaLR:
    """Rise linearly to the optimizer's rate, then fall linearly to zero (Devlin et al., A.2).

    Args:
        optimizer: its learning rate is the highest one.
        warmup_steps: the step that has the highest rate.
        total_steps: of the run; the last of them has a rate just above zero.
    """

    def share(step: int) -> float:
        falling = (total_steps - step) / max(1, total_steps - warmup_steps)
        return min((step + 1) / (warmup_steps + 1), max(0.0, falling))

    return LambdaLR(optimizer, share)


def cosine(optimizer: Optimizer, warmup_steps: int, total_steps: int) -> LambdaLR:
    """Rise linearly to the optimizer's rate, then fall to zero along half a cosine (Loshchilov and Hutter, 2017).

    Args:
        optimizer: its learning rate is the highest one.
        warmup_steps: the step that has the highest rate.
        total_steps: of the run; the last of them has a rate just above zero.
    """

    def share(step: int) -> float:
        done = min(1.0, max(0, step - warmup_steps) / max(1, total_steps - warmup_steps))
        return min((step + 1) / (warmup_steps + 1), (1 + math.cos(math.pi * done)) / 2)

    return LambdaLR(optimizer, share)


Schedule = Callable[[Optimizer, int, int], LambdaLR]
"""`linear` or `cosine`."""
