"""What all rivals share: options, the loop's calls, a frozen front that the journal tells of, intervals."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.proving import RefusedError
from benchmarks.proving.journal import JournalWriter
from benchmarks.rivals.layers import Layers
from benchmarks.workloads.workload import Training


@dataclass(frozen=True)
class Option:
    """A setting of a rival."""

    default: Any
    contract: str
    allows: Callable[[Any], bool]


def is_number(low: float, high: float, *, below: bool = False) -> Callable[[Any], bool]:
    """Return what tells a number from `low` to `high`, or to below it."""
    return lambda value: (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and low <= value <= high
        and not (below and value == high)
    )


def is_count(least: int) -> Callable[[Any], bool]:
    """Return what tells a whole number of at least so many."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


START = "a number from 0 to below 1", is_number(0, 1, below=True)
INTERVAL = "plasticity.interval_steps"


def read_options(name: str, options: Mapping[str, Option], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the value of each option of a rival, from groups of settings.

    Raises:
        RefusedError: there is no such option, or its value is outside of its contract.
    """
    given = {
        key if group == "policy" else f"{group}.{key}": value
        for group, values in settings.items()
        for key, value in values.items()
    }
    for key, value in given.items():
        if key not in options:
            known = f"the settings {', '.join(options)}" if options else "no settings"
            raise RefusedError(f"{name!r} trains without egeria and has {known}; found {key!r}. Correct it.")
        if not options[key].allows(value):
            raise RefusedError(f"{key} of {name!r} must be {options[key].contract}; found {value!r}. Correct it.")
    return {key: given.get(key, option.default) for key, option in options.items()}


@dataclass(eq=False)
class Rival:
    """Trains less of a model, or in fewer steps, in a loop without egeria. By itself it is plain training."""

    training: Training
    values: Mapping[str, Any]
    """Of `options`."""
    journal: JournalWriter

    options: ClassVar[dict[str, Option]] = {}

    @classmethod
    def shorten(cls, training: Training, values: Mapping[str, Any]) -> Training:
        """Return the training with as many steps as the rival makes."""
        return training

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.training.num_epochs * len(self.training.loader)

    @property
    def depth(self) -> int:
        """How many front layer modules are frozen."""
        return 0

    def describe(self) -> dict[str, Any]:
        """Return the layer modules as journals have them; none where what is frozen is no front."""
        return {"modules": [], "trainable": [], "deepest_freeze": 0}

    def forward_shares(self) -> list[float] | None:
        """Return the share of each layer module in a forward pass; None without. To be asked after the training."""
        return None

    def begin_epoch(self, epoch: int) -> None:
        """Get ready for an epoch, counted from 1."""

    def end_step(self, loss: Tensor, batch: Any) -> None:
        """Take note of a step, after the scheduler's: its detached loss and its batch."""

    def close(self) -> None:
        """Leave the model and the optimizer as they were found."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors to go on from."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the model has been loaded."""


@dataclass(eq=False)
class FrontRival(Rival):
    """Freezes front layer modules, and writes it down."""

    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.layers = Layers(self.training.model)
        self.prepare()

    def prepare(self) -> None:
        """Set up what a rival keeps beside; called once."""

    @property
    def depth(self) -> int:
        """How many front layer modules are frozen."""
        return self.layers.depth

    def describe(self) -> dict[str, Any]:
        """Return the layer modules as journals have them."""
        return self.layers.describe()

    def forward_shares(self) -> list[float] | None:
        """Return the share of each layer module in a forward pass."""
        return self.layers.forward_shares(self.training)

    def move_to(self, depth: int, reason: str) -> None:
        """Freeze so many front layer modules, as far as they may, and thaw the others."""
        depth, before, layers = min(depth, self.layers.deepest), self.layers.depth, self.layers
        if depth == before:
            return
        if depth < before:
            self.journal.write("thawed", self.step, frozen_before=before, reason=reason, window=0)
        layers.freeze_to(depth)
        for place in range(before if depth > before else 0, depth):
            self.journal.write(
                "frozen",
                self.step,
                module=place,
                name=layers.modules[place].name,
                frozen=place + 1,
                reason=reason,
                parameter_share=sum(layers.num_trainable[: place + 1]) / max(1, sum(layers.num_trainable)),
            )

    def end_step(self, loss: Tensor, batch: Any) -> None:
        """Count a step."""
        self.step += 1

    def close(self) -> None:
        """Leave the model as it was found."""
        self.layers.freeze_to(0)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors to go on from."""
        return {"step": self.step, "depth": self.depth}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the model has been loaded."""
        self.step = state["step"]
        self.layers.freeze_to(state["depth"])


@dataclass(eq=False)
class IntervalRival(FrontRival):
    """Decides at the end of intervals of so many steps, by what it measured in them."""

    options: ClassVar[dict[str, Option]] = {
        INTERVAL: Option(None, "a whole number above 0", is_count(1)),
        "evaluations": Option(20, "a whole number above 1", is_count(2)),
    }
    least_steps: ClassVar[int] = 1
    """Of an interval."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.interval_steps = self.values[INTERVAL] or self.choose_interval()
        self._losses = torch.zeros(2, device=next(self.training.model.parameters()).device)
        """Sum of the finite losses of the interval, and their number."""

    def choose_interval(self) -> int:
        """Return the steps of an interval, where no setting says."""
        return max(self.least_steps, self.total_steps // self.values["evaluations"])

    def end_step(self, loss: Tensor, batch: Any) -> None:
        """Count a step, and decide where an interval ends with it."""
        super().end_step(loss, batch)
        value = loss.float()
        self._losses += torch.stack([value.nan_to_num(0, 0, 0), value.isfinite().float()])
        if self.step % self.interval_steps == 0:
            total, count = self._losses.tolist()
            self._losses.zero_()
            self.end_interval(total / count if count else None, batch)

    def end_interval(self, loss: float | None, batch: Any) -> None:
        """Decide.

        Args:
            loss: mean of the finite losses of the interval; None where there was none.
            batch: the newest.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors to go on from."""
        return {**super().state_dict(), "losses": self._losses.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the model has been loaded."""
        super().load_state_dict(state)
        self._losses.copy_(state["losses"])


def relative_change(before: float, now: float) -> float:
    """Return the change as a share of what was before; not a number where one of the two is not finite."""
    if not (math.isfinite(before) and math.isfinite(now)):
        return math.nan
    if before == now:
        return 0.0
    return abs(before - now) / abs(before) if before else math.inf
