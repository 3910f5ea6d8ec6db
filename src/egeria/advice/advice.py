"""What freezing could save in a training, as a value that is shown as text, in notebooks and as
JSON.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from egeria.config.checks import check
from egeria.config.plan_text import read_plan, wrong_plan
from egeria.errors import ConfigError
from egeria.report.wording import duration, mebibytes, percent

BAR = 20
"""Length of the longest bar of the table, in characters."""
TEXT_COLUMNS = ("up to", "")
"""Those of the table that are no numbers; the one without a name has the bars."""
SLOW_READING = 0.2
"""Of an iteration: a batch that takes longer to be read is worth a word."""
LEAST_SAVING = 0.03
"""Share of the training time that freezing half of the model for half of the training must save to
be worth a try."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthCost:
    """What one iteration costs with the front `depth` layer modules frozen; medians of those that
    were timed.
    """

    depth: int
    forward_s: float
    backward_s: float
    optimizer_s: float
    """What `step` and `zero_grad` take."""
    cpu_s: float
    """CPU seconds of the process."""
    prefix_s: float | None
    """Of the forward pass, what lies in the frozen front, which a cache would skip; None where it
    was not seen."""
    activation_bytes: int | None
    """What the forward pass keeps for the backward pass, without parameters; None where it cannot
    be counted."""
    gradient_bytes: int
    """Of the parameters that still train."""
    optimizer_bytes: int
    """Of all parameters."""
    peak_bytes: int | None
    """Most memory in use on the accelerator during an iteration, parameters as well, less what was
    in use before the copy was made. None on the CPU."""
    stored_bytes: int | None
    """What the frozen front puts out for one sample: what a cache would keep of it."""

    @property
    def iteration_s(self) -> float:
        """Wall-clock seconds of the whole iteration."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def memory_bytes(self) -> int:
        """What an iteration needs beside the parameters: activations, gradients and optimizer
        state.
        """
        return (self.activation_bytes or 0) + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What freezing could save in a training.

    Shares are of the time of its iterations: forward pass, backward pass and optimizer; of
    evaluations too where they were timed, and of reading batches where the loader has no workers
    that do it meanwhile. What else the loop does between steps is not in them.
    """

    modules: tuple[str, ...]
    """The layer modules, front to back; the last never freezes."""
    costs: tuple[DepthCost, ...]
    """By depth, from none to as many as may freeze, as far as they were measured."""
    num_iterations: int
    evaluation_s: float | None
    """Of one evaluation; None where none was given."""
    iterations_per_evaluation: int | None
    num_samples: int | None
    """Of an epoch; None where nobody knows."""
    reading_s: float
    """Seconds that a batch took to be read in this process."""
    has_workers: bool
    """Of the loader, which hide that, or divide it among them."""
    repeats: bool | None
    """Whether a sample is the same each time it is drawn, as a cache needs; None where that cannot
    be tried."""
    obstacles: tuple[str, ...]
    """What stands in the way, each with the way out."""

    def saving(self, plan: str, *, cached: bool = False) -> float:
        """Return the share of the training time that a plan would save.

        Args:
            plan: as in `policy.plan`, in shares of the training: "0.5:2 0.75:3" for two layer
                modules from half of it on and three from three quarters on.
            cached: whether a cache saves the forward pass of what is frozen too. That is the most
                it can save: filling and reading it take time, and in its first epoch there is
                nothing in it.

        Raises:
            ConfigError: it is no plan, or has absolute steps.
        """
        check("plan", plan, wrong_plan)
        if any(move.is_step for move in read_plan(plan)):
            raise ConfigError(
                f"plan must have shares of the training, since its length is not known here, found "
                f'{plan!r}. Write it as in "0.5:2 0.75:3".'
            )
        moves = [(move.time, move.depth) for move in read_plan(plan)]
        ends = [*(share for share, _ in moves[1:]), 1.0]
        plain_s, saved_s = self._iteration_s(0), 0.0
        for (begin, depth), end in zip(moves, ends, strict=True):
            left_s = self._iteration_s(depth) - (self._prefix_s(depth) if cached else 0.0)
            saved_s += (end - begin) * (plain_s - left_s)
        return saved_s / (plain_s + self._unchanged_s)

    @property
    def half_saving(self) -> float:
        """Share of the time saved with the front half of the model, by time, frozen from half of
        the training on.
        """
        whole = self._iteration_s(0) - self._iteration_s(self.costs[-1].depth)
        halfway = (c.depth for c in self.costs if self._iteration_s(0) - c.iteration_s >= whole / 2)
        return self.saving(f"0.5:{next(halfway, 0)}") if self.costs[-1].depth else 0.0

    @property
    def is_worth_it(self) -> bool:
        """Whether freezing is worth a try here."""
        return self.half_saving >= LEAST_SAVING

    @property
    def verdict(self) -> str:
        """The advice in one or two sentences."""
        if not self.costs[-1].depth:
            return "Not worth it: nothing can freeze."
        most = 1 - self.costs[-1].iteration_s / self.costs[0].iteration_s
        told = (
            f"with all that may freeze frozen an iteration takes {percent(most)} less time, and "
            "with the front half of "
            f"that from half of the training on, training takes {percent(self.half_saving)} less"
        )
        return f"{'Worth a try' if self.is_worth_it else 'Not worth it'}: {told}."

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        derived = {
            "half_saving": self.half_saving,
            "is_worth_it": self.is_worth_it,
            "verdict": self.verdict,
        }
        return {**asdict(self), **derived}

    def to_json(self) -> str:
        """Return everything as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table: a row for each depth, below the names of the columns."""
        plain = self.costs[0]
        times = ("forward", "backward", "optimizer", "iteration")
        found: list[tuple[str, ...]] = [
            ("frozen", "up to", *times, "", "saved", "memory", "with a cache")
        ]
        for cost in self.costs:
            prefix_s = None if self.repeats is False or not cost.depth else cost.prefix_s
            found.append(
                (
                    f"{cost.depth}",
                    self.modules[cost.depth - 1] if cost.depth else "-",
                    *(
                        f"{1000 * part:.1f} ms"
                        for part in (cost.forward_s, cost.backward_s, cost.optimizer_s)
                    ),
                    f"{1000 * cost.iteration_s:.1f} ms",
                    "█" * round(BAR * cost.iteration_s / plain.iteration_s),
                    percent(1 - cost.iteration_s / plain.iteration_s),
                    mebibytes(cost.memory_bytes if cost.peak_bytes is None else cost.peak_bytes),
                    "-"
                    if prefix_s is None
                    else percent(1 - (cost.iteration_s - prefix_s) / plain.iteration_s),
                )
            )
        return found

    def notes(self) -> list[str]:
        """Return what is to be said below the table."""
        found = [self.verdict]
        if self.evaluation_s is not None:
            found.append(
                f"One evaluation takes {duration(self.evaluation_s)}, which freezing does not "
                "change."
            )
        if self.reading_s > SLOW_READING * self.costs[0].iteration_s:
            found.append(
                f"Reading a batch takes {duration(self.reading_s)} in this process. Where the "
                "loader's workers do not "
                f"hide that, training waits for it, and freezing saves less than is told here."
                if self.has_workers
                else f"Reading a batch takes {duration(self.reading_s)}, for which training "
                "waits, and which freezing "
                f"does not change. Workers of the loader would hide it."
            )
        stored = max((cost.stored_bytes or 0 for cost in self.costs), default=0)
        if self.repeats and stored and self.num_samples:
            found.append(
                "A cache can work: samples repeat, and take "
                f"{mebibytes(stored * self.num_samples)} at most."
            )
        elif self.repeats is False:
            found.append(
                "No cache: a sample is another one each time it is drawn, as with random "
                "augmentation."
            )
        return [*found, *(f"In the way: {obstacle}" for obstacle in self.obstacles)]

    def __repr__(self) -> str:
        """Return the table and the advice as text."""
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(_aligned(*cell) for cell in zip(rows[0], row, widths, strict=True))
            for row in rows
        ]
        return "\n".join([*lines, "", *self.notes()])

    def _repr_html_(self) -> str:
        head, *rows = [[html.escape(cell) for cell in row] for row in self.rows()]
        lines = [f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"]
        lines += [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes())
        return f"<table><caption>What freezing could save</caption>{''.join(lines)}</table>{notes}"

    @property
    def _unchanged_s(self) -> float:
        """Seconds of evaluation and of waiting for the batch, for each iteration."""
        evaluation_s = (self.evaluation_s or 0.0) / (self.iterations_per_evaluation or 1)
        return evaluation_s + (0.0 if self.has_workers else self.reading_s)

    def _iteration_s(self, depth: int) -> float:
        return _between([(cost.depth, cost.iteration_s) for cost in self.costs], depth)

    def _prefix_s(self, depth: int) -> float:
        return _between([(cost.depth, cost.prefix_s or 0.0) for cost in self.costs], depth)


def _between(points: Sequence[tuple[int, float]], depth: int) -> float:
    """Return the value at a depth, on the straight line between those that were measured; the last
    holds for more.
    """
    for (before, low), (after, high) in itertools.pairwise(points):
        if depth <= after:
            return low + (high - low) * (depth - before) / (after - before)
    return points[-1][1]


def _aligned(column: str, cell: str, width: int) -> str:
    return cell.ljust(width) if column in TEXT_COLUMNS else cell.rjust(width)
