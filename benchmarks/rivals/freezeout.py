"""FreezeOut: freezes at times given in advance."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from benchmarks.rivals.base import START, FrontRival, Option

ROUNDING = 1e-9
"""Shares are sums in floating point: the smallest error must not put a freeze off by a step."""
POWERS = {"linear": 1, "squared": 2, "cubic": 3}


@dataclass(eq=False)
class FreezeOut(FrontRival):
    """'freezeout': anneals the learning rate of each layer module to zero at its own time, and freezes it then.

    Module `i` of `0..L`, where `L` is the last, ends at the share `r_i = (t_0 + (1 - t_0) * i / L) ** p` of the
    training. Until then its rate is `lr_i(t) = lr_i(0) / 2 * (1 + cos(pi * t / r_i))` with `lr_i(0) = lr`, or
    `lr / r_i` where scaled. `lr` is the initial rate of the optimizer: this takes the place of the schedule of the
    whole run, for the last module (`r_L = 1`) too.

    Source: Brock et al., "FreezeOut" (arXiv 1706.04983), with the 1/2 that the printed formula lacks.
    """

    options: ClassVar[dict[str, Option]] = {
        "start": Option(0.8, *START),
        "shape": Option("cubic", f"one of {', '.join(POWERS)}", POWERS.__contains__),
        "scaled": Option(True, "true or false", lambda value: isinstance(value, bool)),
    }

    def prepare(self) -> None:
        """Set the times, and the rates of each step."""
        self.ends = find_ends(self.layers.deepest + 1, self.values["start"], self.values["shape"])[:-1]
        optimizer = self.training.optimizer
        self._groups = optimizer.param_groups
        self._handles = (
            optimizer.register_step_pre_hook(lambda *_: self._take_rates_apart()),
            optimizer.register_step_post_hook(lambda *_: self._put_groups_back()),
        )

    def end_step(self, loss: Tensor, batch: Any) -> None:
        """Freeze what has come to its time."""
        super().end_step(loss, batch)
        done = self.step / self.total_steps
        self.move_to(sum(end <= done + ROUNDING for end in self.ends), f"{done:.1%} of the training is done")

    def _take_rates_apart(self) -> None:
        """Let the optimizer have a group for each layer module, for one step."""
        done = self.step / self.total_steps
        ends = [*self.ends, 1.0]
        shares = {id(entry): end for own, end in zip(self.layers.parameters, ends, strict=True) for entry in own}
        self._groups = self.training.optimizer.param_groups
        self.training.optimizer.param_groups = [
            {**group, "params": part, "lr": group.get("initial_lr", group["lr"]) * self._rate_share(done, end)}
            for group in self._groups
            for end in sorted({shares.get(id(entry), 1.0) for entry in group["params"]})
            if (part := [entry for entry in group["params"] if shares.get(id(entry), 1.0) == end])
        ]

    def _put_groups_back(self) -> None:
        self.training.optimizer.param_groups = self._groups

    def _rate_share(self, done: float, end: float) -> float:
        return rate_share(done, end, scaled=self.values["scaled"])

    def close(self) -> None:
        """Leave the model and the optimizer as they were found."""
        super().close()
        for handle in self._handles:
            handle.remove()


def find_ends(count: int, start: float, shape: str) -> list[float]:
    """Return the share of the training at which the rate of each of so many layer modules has come down to 0."""
    return [(start + (1 - start) * place / max(1, count - 1)) ** POWERS[shape] for place in range(count)]


def rate_share(done: float, end: float, *, scaled: bool) -> float:
    """Return the rate of a layer module that ends at a share of the training, as a share of the initial one."""
    if done >= end:
        return 0.0
    return (1 / end if scaled else 1.0) / 2 * (1 + math.cos(math.pi * done / end))
