"""AutoFreeze: freezes by how much gradients change."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.rivals.base import IntervalRival, Option, is_number, relative_change


@dataclass(eq=False)
class AutoFreeze(IntervalRival):
    """'autofreeze': freezes the front modules whose gradients change less than those of the others.

    At the end of interval `k`, `G_l(k)` is the L1 norm of the gradients of module `l` summed over the interval, and
    `eta_l = |G_l(k-1) - G_l(k)| / G_l(k-1)`. With the percentile of `eta` over the modules that are still active as the
    threshold, the first of them with `eta >= threshold` becomes the first one in training. Nothing thaws. Gradients
    are those that the optimizer is given: clipped, where the loop clips.

    Source: Liu et al., "AutoFreeze" (arXiv 2102.01386), and its code.
    """

    options: ClassVar[dict[str, Option]] = {
        **IntervalRival.options,
        "percentile": Option(50.0, "a number from 0 to 100", is_number(0, 100)),
    }

    def prepare(self) -> None:
        """Add up gradients from now on."""
        self._before: list[float] | None = None
        self._sums: dict[str, Tensor] = {}
        self._handle = self.training.optimizer.register_step_pre_hook(lambda *_: self._add_up())

    @torch.no_grad()
    def _add_up(self) -> None:
        for module, own in zip(self.layers.modules, self.layers.parameters, strict=True):
            for name, parameter in zip(module.parameters, own, strict=True):
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    self._sums[name] = self._sums[name] + gradient if name in self._sums else gradient.clone()

    def end_interval(self, loss: float | None, batch: Any) -> None:
        """Compare the gradients of this interval with those of the one before."""
        sums, self._sums = {name: float(total.abs().sum()) for name, total in self._sums.items()}, {}
        norms = [sum(sums.get(name, 0.0) for name in module.parameters) for module in self.layers.modules]
        before, self._before = self._before, norms
        if before is not None:
            active = [place for place in range(self.depth, len(norms)) if self.layers.trainable[place]]
            changes = [relative_change(before[place], norms[place]) for place in active]
            first = first_that_changes(active, changes, self.values["percentile"])
            if first is not None and first > self.depth:
                self.move_to(first, "its gradients change less than those of the others")

    def close(self) -> None:
        """Leave the model and the optimizer as they were found."""
        super().close()
        self._handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors to go on from."""
        return {**super().state_dict(), "before": self._before, "sums": dict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the model has been loaded."""
        super().load_state_dict(state)
        self._before = state["before"]
        self._sums = {name: total.to(self._losses.device) for name, total in state["sums"].items()}


def first_that_changes(active: Sequence[int], changes: Sequence[float], percent: float) -> int | None:
    """Return the first module that changes by the percentile of all; None where a change is not finite enough to say.

    Args:
        active: modules that train, front to back.
        changes: of the gradients of each.
        percent: from 0 to 100.
    """
    if not changes or any(math.isnan(change) for change in changes):
        return None
    threshold = percentile(changes, percent)
    return next(place for place, change in zip(active, changes, strict=True) if change >= threshold)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile of values, interpolated linearly between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    lower = math.floor(place)
    if place == lower or ordered[lower] == ordered[lower + 1]:
        return ordered[lower]
    between = ordered[lower] + (place - lower) * (ordered[lower + 1] - ordered[lower])
    return min(between, ordered[lower + 1])
