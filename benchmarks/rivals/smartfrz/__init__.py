"""SmartFRZ: a predictor that tells from the weights of a layer module whether to freeze it.

`WeightHistory` gathers snapshots of the weights in an interval, `FreezePredictor` looks at them. The weights of the
predictor lie beside it, with [their card](CARD.md); the study that trained them is closed (record 0027).

Source: SmartFRZ (arXiv 2401.16720), as far as its text tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.rivals.base import INTERVAL, IntervalRival, Option, is_count, is_number
from benchmarks.rivals.smartfrz.history import WeightHistory
from benchmarks.rivals.smartfrz.predictor import NUM_SNAPSHOTS, load_predictor


@dataclass(eq=False)
class SmartFrz(IntervalRival):
    """'smartfrz': freezes the front modules of which a trained predictor says so, at the end of each interval.

    The predictor sees 30 snapshots of 1,024 weights of a layer module, evenly spaced over the interval, a twentieth of
    the training. Front to back, so that a freeze saves; nothing thaws.

    Source: SmartFRZ (arXiv 2401.16720), which asks at the end of each epoch. Only like it: the paper's text leaves
    open what it was trained on.
    """

    least_steps: ClassVar[int] = NUM_SNAPSHOTS
    options: ClassVar[dict[str, Option]] = {
        **IntervalRival.options,
        INTERVAL: Option(None, f"a whole number from {NUM_SNAPSHOTS}", is_count(NUM_SNAPSHOTS)),
        "freeze_score": Option(0.5, "a number from 0 to 1", is_number(0, 1)),
    }

    def prepare(self) -> None:
        """Look at weights from now on."""
        self._history = WeightHistory(self.training.model)

    def end_step(self, loss: Tensor, batch: Any) -> None:
        """Look at the weights, and decide where an interval ends."""
        self._history.end_step()
        super().end_step(loss, batch)

    def end_interval(self, loss: float | None, batch: Any) -> None:
        """Freeze as far as the predictor says so without a gap."""
        windows = self._history.windows(self.layers.modules)
        known = [window for window in windows if window is not None]
        scores = iter(load_predictor().score(torch.stack(known)) if known else ())
        found = [None if window is None else next(scores) for window in windows]
        self.move_to(*find_depth(found, self.layers.trainable, self.depth, self.values["freeze_score"]))

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors to go on from."""
        return {**super().state_dict(), "history": self._history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the model has been loaded."""
        super().load_state_dict(state)
        self._history.load_state_dict(state["history"])


def find_depth(scores: list[float | None], trainable: list[bool], depth: int, limit: float) -> tuple[int, str]:
    """Return how many front modules are to be frozen, and why.

    Args:
        scores: for each layer module the probability that it may freeze; None or NaN where it is not known.
        trainable: for each, whether it has anything to train.
        depth: how many are frozen.
        limit: probability over which one freezes.
    """
    passed: list[float] = []
    reached, place = depth, depth
    while place < len(scores) - 1:
        score = scores[place]
        if trainable[place]:
            if score is None or math.isnan(score) or not score > limit:
                break
            passed.append(score)
        place += 1
        reached = place if passed else depth
    return reached, f"the predictor gives {min(passed, default=0.0):.0%} for a freeze"
