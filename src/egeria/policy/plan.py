"""The default policy: a plan of how many layer modules are frozen when, drawn up beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from egeria.config import PolicyConfig
from egeria.config.plan_text import Move, read_plan
from egeria.errors import ConfigError
from egeria.policy.base import FrontPolicy
from egeria.policy.protocol import Decision, Interval

EVEN_START = 0.5
"""Share of the steps after which an even plan begins to freeze (record 0033)."""
PLANNED = ("plan", "static", "linear")
"""Names of the policies that follow a plan."""
ROUNDING = 1e-9
"""A share times a number of steps must not miss a whole step by an error in the last digit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How many front layer modules are frozen over a training, and why.

    `str(plan)` is its text: pass it, or a changed one, as `plan=` to `egeria.attach`.
    """

    moves: tuple[Move, ...]
    """In the order of time."""
    modules: tuple[str, ...] = ()
    """Names of the layer modules, front to back. The last one is never frozen."""
    total_steps: int | None = None
    reason: str = ""

    @classmethod
    def parse(
        cls,
        text: str,
        modules: Sequence[str] = (),
        total_steps: int | None = None,
        reason: str = "given by the user",
    ) -> Plan:
        """Return the plan of a text such as "0.5:1 0.75:2" or "step 500:2".

        Raises:
            ConfigError: it has shares of a training whose length is not known, or moves that are
                not in the order of time.
        """
        moves = read_plan(text)
        if total_steps is None and not all(move.is_step for move in moves):
            raise ConfigError(
                f"The plan {text!r} has shares of the training, so its length must be known, found "
                "total_steps=None. Pass total_steps=len(loader) * epochs to attach, or write "
                'absolute steps such as "step 500:2".'
            )
        steps = [move.step(total_steps) for move in moves]
        if steps != sorted(set(steps)):
            raise ConfigError(
                "A plan has its entries in the order of time, each at a moment of its own, found "
                f"{text!r} for {total_steps} steps. Sort its entries."
            )
        return cls(moves=moves, modules=tuple(modules), total_steps=total_steps, reason=reason)

    @property
    def freezes(self) -> bool:
        """Whether anything is ever frozen."""
        return any(self._depth(move) for move in self.moves)

    def depth_at(self, step: int) -> int:
        """Return how many layer modules are frozen once `step` optimizer steps are done."""
        past = (
            move for move in reversed(self.moves) if move.step(self.total_steps) <= step + ROUNDING
        )
        return next(map(self._depth, past), 0)

    def next_move(self, step: int) -> Move | None:
        """Return the next entry after `step` that changes how many layer modules are frozen."""
        depth = self.depth_at(step)
        ahead = (move for move in self.moves if move.step(self.total_steps) > step + ROUNDING)
        return next((move for move in ahead if self._depth(move) != depth), None)

    def skipped_share(self, backward_shares: Sequence[float]) -> float:
        """Return the share of the training's compute that the plan skips.

        Args:
            backward_shares: for each layer module the share of an iteration that is its backward
                pass.
        """
        total = self.total_steps
        if not total:
            return 0.0
        times = [min(total, move.step(total)) for move in self.moves] + [float(total)]
        return sum(
            (end - begin) / total * sum(backward_shares[: self._depth(move)])
            for move, begin, end in zip(self.moves, times, times[1:], strict=False)
        )

    def _depth(self, move: Move) -> int:
        return min(move.depth, len(self.modules) - 1) if self.modules else move.depth

    def __str__(self) -> str:
        return " ".join(map(str, self.moves))

    def __repr__(self) -> str:
        what = f"of {len(self.modules)} layer modules" if self.modules else ""
        return f"<egeria plan {str(self) or 'freezes nothing'!r} {what}: {self.reason}>"

    def _repr_html_(self) -> str:
        """Return a picture for notebooks: frozen layer modules over the steps."""
        total = self.total_steps or 2 * max((move.time for move in self.moves), default=1)
        rows = len(self.modules) or 1 + max((move.depth for move in self.moves), default=0)
        times = [move.step(self.total_steps) / total for move in self.moves] + [1.0]
        boxes = "".join(
            f'<rect x="{400 * begin:.1f}" y="{12 * (rows - self._depth(move))}" '
            f'width="{400 * (end - begin):.1f}" height="{12 * self._depth(move)}" fill="#7aa6c2"/>'
            for move, begin, end in zip(self.moves, times, times[1:], strict=False)
        )
        return (
            f'<svg width="400" height="{12 * rows}" style="background:#eee" role="img">'
            f"<title>Frozen layer modules of {rows} over the steps</title>{boxes}</svg>"
        )


def draw_up(modules: Sequence[str], pretrained: bool, total_steps: int | None) -> Plan:
    """Return the plan of a training, before its first step.

    A pretrained model gets the even plan of the second half of the training. Of a model that is
    trained from scratch nothing is frozen.

    Args:
        modules: names of the layer modules, front to back.
        pretrained: whether their weights come from an earlier training.
        total_steps: optimizer steps of the training, None where unknown.
    """
    if not pretrained:
        return Plan(
            moves=(),
            modules=tuple(modules),
            total_steps=total_steps,
            reason="the model is trained from scratch; policy='egeria' has the rule of the paper",
        )
    if total_steps is None:
        return Plan(
            moves=(),
            modules=tuple(modules),
            reason="total_steps is not known; pass it to attach",
        )
    return Plan(
        moves=even_moves(len(modules)),
        modules=tuple(modules),
        total_steps=total_steps,
        reason=f"the model is pretrained: one after the other from {EVEN_START:.0%} of the steps",
    )


def even_moves(num_modules: int, start: float = EVEN_START) -> tuple[Move, ...]:
    """Return moves that freeze one layer module after the other, evenly from `start` on.

    Module `i` of `L`, counted from 0, freezes at `start + (1 - start) * (i + 1) / (L - 1)`, so that
    the last that may would freeze at the very end.

    Source: MosaicML Composer, `LayerFreezing`, which counts leaf layers by epochs.
    """
    last = num_modules - 1
    shares = (start + (1 - start) * depth / last for depth in range(1, last))
    # Cut after four digits: rounded up, a share would come to lie behind the step it stands for.
    return tuple(
        Move(math.floor(1e4 * share + ROUNDING) / 1e4, depth)
        for depth, share in enumerate(shares, start=1)
    )


def find_plan(
    settings: PolicyConfig, modules: Sequence[str], pretrained: bool, total_steps: int | None
) -> Plan | None:
    """Return the plan that settings ask for: as given, by the name of a policy, or drawn up; None
    for a policy that follows none.

    Raises:
        ConfigError: it has shares of a training whose length is not known.
    """
    if settings.name not in PLANNED:
        return None
    if settings.plan is not None:
        return Plan.parse(settings.plan, modules, total_steps)
    if settings.name == "linear":
        text = " ".join(map(str, even_moves(len(modules), settings.start)))
        return Plan.parse(text, modules, total_steps, "the even plan of policy 'linear'")
    return draw_up(modules, pretrained, total_steps)


class PlanPolicy(FrontPolicy):
    """'plan': follows `policy.plan`; a move is made at the end of the first interval behind it."""

    _saved = (*FrontPolicy._saved, "text")

    def _prepare(self) -> None:
        modules = ("",) * len(self._trainable)
        plan = find_plan(self._config.policy, modules, False, self._total_steps)
        self._text = "" if plan is None else str(plan)

    @property
    def plan(self) -> Plan:
        """The plan; of a resumed run that of its beginning."""
        return Plan.parse(self._text, ("",) * len(self._trainable), self._total_steps)

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Return the decisions of the newest move whose time has come."""
        depth = self.plan.depth_at(interval.step)
        if self._total_steps is None:
            done = f"{interval.step} steps are done"
        else:
            done = f"{interval.step / self._total_steps:.1%} of the training is done"
        what = f"{depth} layer module{'' if depth == 1 else 's'}" if depth else "nothing"
        return self._move_to(depth, f"{done}, and the plan freezes {what} from here on")

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return for how many steps the boundary stays; None: to the end of the training."""
        move = self.plan.next_move(step)
        return None if move is None else move.step(self._total_steps) - step
