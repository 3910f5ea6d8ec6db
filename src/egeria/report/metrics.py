"""The numbers the user logged: where they ended and where they were best."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from egeria.events import MetricLogged
from egeria.report.history import History

_WORDS_OF_LESS = {
    "loss", "error", "err", "perplexity", "ppl", "mse", "rmse", "mae", "wer", "cer", "ter", "fid", "nll",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric over the run."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    lower_is_better: bool
    """Guessed from the name ('loss', 'error', 'perplexity', …); the page says which way it was read."""

    @property
    def final(self) -> float:
        """The value logged last, finite or not."""
        return self.values[-1]

    @property
    def num_finite(self) -> int:
        """How many of the values are finite."""
        return sum(map(math.isfinite, self.values))

    @property
    def best(self) -> float | None:
        """The best finite value; None where there was none."""
        finite = [value for value in self.values if math.isfinite(value)]
        return (min if self.lower_is_better else max)(finite) if finite else None

    @property
    def best_step(self) -> int | None:
        """The step at which the best value was first logged."""
        return None if self.best is None else self.steps[self.values.index(self.best)]


def list_metrics(history: History) -> tuple[Metric, ...]:
    """Return the metrics in the order in which they were first logged."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for event in history.of(MetricLogged):
        for name, value in event.values.items():
            if _is_number(value):
                steps, values = found.setdefault(str(name), ([], []))
                steps.append(event.step)
                values.append(float(value))
    return tuple(
        Metric(name=name, steps=tuple(steps), values=tuple(values), lower_is_better=lower_is_better(name))
        for name, (steps, values) in found.items()
    )


def lower_is_better(name: str) -> bool:
    """Guess from the words in a metric's name whether less of it is better."""
    return not _WORDS_OF_LESS.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
