"""The average that replaces the weights of layer modules at their freeze, and the statistics that
go with it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from egeria.layers.shards import own_part

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Layers whose statistics are those of the weights in front of them."""


FEWEST_PAIRS = 3
"""Of steps that have to be compared, or the average is not taken."""
MOST_ERRORS = 2.0
"""Standard errors by which the loss with the average may be above that with the weights as trained.
Our choice."""


@dataclass(eq=False)
class AveragedWeights:
    """A running average of parameters, which can take their place, and the batch statistics seen
    meanwhile.

    Weights are written past autograd and its version counters: nothing may take that for a step of
    an optimizer, and no graph may wait for its backward pass. Of parameters in parts it is that of
    this process' part. Takes memory for a copy of the parameters in float32, and for one more while
    the average is in place.
    """

    model: nn.Module
    parameters: Sequence[str]
    """Names of the parameters."""
    submodules: Sequence[str]
    """Names of the submodules that they are of; their batch normalisation gets new statistics."""

    def __post_init__(self) -> None:
        roots = [(name, self.model.get_submodule(name)) for name in self.submodules]
        named = (entry for name, root in roots for entry in root.named_modules(prefix=name))
        norms = {module: name for name, module in named if isinstance(module, NORMS)}
        self._norms = [name for module, name in norms.items() if _learns(module)]
        self._average: dict[str, Tensor] = {}
        self._num_averaged = 0
        self._raw: dict[str, Tensor] = {}
        """What the average has taken the place of."""
        self._statistics: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        """The buffers of each norm before the average took its place: mean, variance, number of
        batches."""
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._num_summed: dict[str, int] = {}
        """Over how many steps of the loop the statistics of each norm were added up."""

    @property
    def is_in_place(self) -> bool:
        """Whether the model has the average now."""
        return bool(self._raw)

    @torch.no_grad()
    def take_in(self) -> None:
        """Make the weights, as they are, part of the average."""
        self._num_averaged += 1
        for name in self.parameters:
            weights = self._own(name)
            if name not in self._average:
                wide = torch.promote_types(weights.dtype, torch.float32)
                self._average[name] = weights.to(wide, copy=True)
            else:
                average = self._average[name]
                average.add_(weights.to(average.dtype) - average, alpha=1 / self._num_averaged)

    @torch.no_grad()
    def put_in(self) -> None:
        """Put the average in place of the weights, until `take_out` or `keep`."""
        if not self._num_averaged:  # of a state that was saved by another process
            self.take_in()
        for name in self._norms:
            mean, variance, count = _buffers(self.model.get_submodule(name))
            self._statistics[name] = mean.clone(), variance.clone(), count.clone()
        for name in self.parameters:
            weights = self._own(name)
            self._raw[name] = weights.clone()
            weights.copy_(self._average[name])

    @torch.no_grad()
    def take_out(self) -> None:
        """Give the model its weights and statistics back, and record those of the batches that it
        saw meanwhile.
        """
        while self._raw:
            name, weights = self._raw.popitem()
            self._own(name).copy_(weights)
        found = {}
        for name, before in self._statistics.items():
            buffers = _buffers(self.model.get_submodule(name))
            found[name] = before, tuple(buffer.clone() for buffer in buffers)
            for buffer, saved in zip(buffers, before, strict=True):
                buffer.copy_(saved)
        self._statistics = {}
        for name, (before, after) in found.items():
            self._record(name, before, after)

    @torch.no_grad()
    def use_statistics(self) -> None:
        """While the average is in place, give normalisation the mean of the statistics that were
        recorded with it.
        """
        for name, sums in self._sums.items():
            for buffer, total in zip(
                _buffers(self.model.get_submodule(name))[:2], sums, strict=True
            ):
                buffer.copy_(total / self._num_summed[name])

    def keep(self) -> None:
        """Leave the average in place for good."""
        self._raw, self._statistics = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the statistics so far; not while it is in place."""
        return {
            "average": {name: values.clone() for name, values in self._average.items()},
            "num_averaged": self._num_averaged,
            "sums": {name: [total.clone() for total in sums] for name, sums in self._sums.items()},
            "num_summed": dict(self._num_summed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        at = {name: self._own(name).device for name in self.parameters}
        self._average = {
            name: values.to(at[name], copy=True) for name, values in state["average"].items()
        }
        self._num_averaged, self._num_summed = int(state["num_averaged"]), dict(state["num_summed"])
        for name, sums in state["sums"].items():
            mean, variance = (
                total.to(_buffers(self.model.get_submodule(name))[0].device, copy=True)
                for total in sums
            )
            self._sums[name] = mean, variance

    def _own(self, name: str) -> Tensor:
        """Return what this process has of a parameter [...]; writing to it leaves no trace but the
        values.
        """
        return own_part(self.model.get_parameter(name).detach()).data

    def _record(self, name: str, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """Add the statistics of the batches between `before` and `after`, free of what was there
        before.

        A running value is `kept * before + (1 - kept) * mean of the batches`; of several batches in
        a step the newer ones weigh more in that mean, as they do in training.
        """
        num_before, num_now = int(before[2]), int(after[2])
        momentum: Any = self.model.get_submodule(name).momentum
        kept = (
            num_before / max(1, num_now)
            if momentum is None
            else (1 - momentum) ** (num_now - num_before)
        )
        if num_now == num_before or kept == 1:
            return
        mean, variance = ((after[at] - kept * before[at]) / (1 - kept) for at in (0, 1))
        known = self._sums.get(name)
        self._sums[name] = (
            (mean, variance) if known is None else (known[0] + mean, known[1] + variance)
        )
        self._num_summed[name] = self._num_summed.get(name, 0) + 1


def _learns(norm: nn.Module) -> bool:
    return all(
        getattr(norm, name, None) is not None
        for name in ("running_mean", "running_var", "num_batches_tracked")
    )


def _buffers(norm: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    return mean.data, variance.data, count.data  # type: ignore[return-value]


class Comparison(NamedTuple):
    """Training steps with the average against steps with the weights as trained."""

    num_pairs: int
    raw_loss: float | None
    landed_loss: float | None
    error: float | None
    """Standard error of the difference."""
    reason: str
    """Why the average is not taken; empty where it is."""


def compare(losses: Sequence[Sequence[Sequence[float]]]) -> Comparison:
    """Compare steps with the average and as trained.

    Args:
        losses: of each process, for each pair of steps the loss as trained and with the average.
    """
    pairs = [
        [statistics.fmean(side) for side in zip(*rows, strict=True)]
        for rows in zip(*losses, strict=False)
    ]
    is_broken = any(math.isfinite(raw) and not math.isfinite(landed) for raw, landed in pairs)
    finite = [pair for pair in pairs if all(map(math.isfinite, pair))]
    if len(finite) < FEWEST_PAIRS or is_broken:
        reason = (
            "the loss was not finite with the average"
            if is_broken
            else "too few steps could be compared"
        )
        return Comparison(len(finite), None, None, None, reason)
    raw_loss, landed_loss = (statistics.fmean(side) for side in zip(*finite, strict=True))
    error = statistics.stdev(landed - raw for raw, landed in finite) / math.sqrt(len(finite))
    is_worse = landed_loss - raw_loss > MOST_ERRORS * error
    reason = (
        f"the loss with the average was worse by more than {MOST_ERRORS:g} standard errors"
        if is_worse
        else ""
    )
    return Comparison(len(finite), raw_loss, landed_loss, error, reason)
