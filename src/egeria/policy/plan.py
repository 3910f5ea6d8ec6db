"""The default policy: a plan of how many layer modules are frozen when, drawn up beforehand."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from egeria.config import Config, PolicyConfig, check
from egeria.errors import ConfigError
from egeria.moves import ROUNDING, Move, read_plan, wrong_plan
from egeria.policy.base import Depth, Interval, Wants

PLANNED = ("plan", "static", "linear")  # names of the policies that follow a plan
JUDGED_STEPS = 8  # the mean loss of fewer steps says little
ALONE = 0.25  # share of the steps in which the last layer module trains alone
MANY_EPOCHS = 10  # in more epochs it trains alone for as long as in so many
FALLEN = 0.4  # or twice as long, if the first epoch ends under this share of the highest loss
LATE_START = 0.7  # share of the steps after which modules freeze evenly
LATER_START = 0.8  # the same with SGD and of convolutions: a start at half cost 3.3 points
AT_ONCE = 0.9  # the same where all but the last freeze at once, since statistics settle slowly


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How many front layer modules are frozen over a training, and why.

    `str(plan)` is its text: pass it, or a changed one, as `plan=` to `egeria.attach`.
    """

    moves: tuple[Move, ...]  # in the order of time
    modules: tuple[str, ...] = ()  # names, front to back; the last one is never frozen
    total_steps: int | None = None
    reason: str = ""

    @classmethod
    def parse(
        cls,
        text: str,
        modules: Sequence[str] = (),
        total_steps: int | None = None,
        reason: str = "given by the user",
    ) -> "Plan":
        """Return the plan of a text such as "0.5:1 0.75:2" or "step 500:2".

        Raises:
            ConfigError: the length of the training is not known, or moves are not in order.
        """
        check("plan", text, wrong_plan)
        moves = read_plan(text)
        if total_steps is None and not all(move.is_step for move in moves):
            raise ConfigError(
                f"The plan {text!r} has shares of the training, whose length is not known, found "
                "total_steps=None. Pass total_steps=len(loader) * epochs to attach."
            )
        steps = [move.step(total_steps) for move in moves]
        if steps != sorted(set(steps)):
            raise ConfigError(
                "The entries of a plan are in the order of time, each at its own, found "
                f"{text!r} for {total_steps} steps. Sort its entries."
            )
        return cls(moves=moves, modules=tuple(modules), total_steps=total_steps, reason=reason)

    def depth_at(self, step: int) -> int:
        """Return how many layer modules are frozen once `step` optimizer steps are done."""
        num_past = bisect_right(self.steps, step)
        return self._depth(self.moves[num_past - 1]) if num_past else 0

    @property
    def steps(self) -> tuple[int, ...]:
        """How many optimizer steps are done at each move: the first whole one not before it."""
        return tuple(math.ceil(move.step(self.total_steps) - ROUNDING) for move in self.moves)

    def skipped_share(self, backward_shares: Sequence[float]) -> float:
        """Return the share of the compute that it skips, given those of the backward passes."""
        return sum(share * sum(backward_shares[:depth]) for depth, share in self._phases())

    def share_at(self, depth: int) -> float:
        """Return the share of the steps at which `depth` layer modules are frozen."""
        return sum(share for at, share in self._phases() if at == depth)

    def _phases(self) -> list[tuple[int, float]]:
        """Return depth and share of the steps, from the beginning on."""
        total = self.total_steps or 1
        times = [min(move.step(self.total_steps), total) / total for move in self.moves]
        edges, depths = [0.0, *times, 1.0], [0, *map(self._depth, self.moves)]
        widths = (end - begin for begin, end in itertools.pairwise(edges))
        return list(zip(depths, widths, strict=True))

    def _depth(self, move: Move) -> int:
        return min(move.depth, len(self.modules) - 1) if self.modules else move.depth

    def __str__(self) -> str:
        return " ".join(map(str, self.moves))

    def __repr__(self) -> str:
        what = f"of {len(self.modules)} layer modules" if self.modules else ""
        return f"<egeria plan {str(self) or 'freezes nothing'!r} {what}: {self.reason}>"


def draw_up(
    modules: Sequence[str],
    total_steps: int | None,
    *,
    pretrained: bool,
    adaptive: bool,
    convolutional: bool,
    adapted: bool,
    norm_steps: float = 0.0,
    epoch_steps: int | None = None,
) -> Plan:
    """Return the plan of a training; that of a model trained from scratch freezes nothing.

    Args:
        modules: names of the layer modules, front to back.
        total_steps: optimizer steps of the training; None where that is not known.
        pretrained: whether the weights come from an earlier training.
        adaptive: whether the optimizers scale each parameter's steps, as Adam does. Steps of SGD
            are as long as gradients, and a head that fits leaves the body small ones (record 0048).
        convolutional: whether most weights are convolutions', or there is batch normalisation.
            Such networks lost accuracy when the last layer module trained alone (record 0049).
        adapted: whether adapters train in place of the weights, as with LoRA (record 0052).
        norm_steps: over how many steps batch normalisation averages; old statistics cost accuracy
            in frozen layers (record 0055).
        epoch_steps: optimizer steps of an epoch; None where that is not known. If it trains alone
            for many epochs, the last layer module learns few samples by heart (record 0058).
    """
    moves: tuple[Move, ...] = ()
    if not pretrained:
        reason = "the model is trained from scratch; policy='egeria' has the rule of the paper"
    elif total_steps is None:
        reason = "total_steps is not known; pass it to attach"
    else:
        start = LATE_START if adaptive and not convolutional else LATER_START
        moves, end, what = even_moves(len(modules), start), start, "everything trains"
        if norm_steps > (1 - AT_ONCE) * total_steps:  # more than are left then
            moves, end = (Move(AT_ONCE, max(0, len(modules) - 1)),), AT_ONCE
        elif start == LATE_START and not adapted and len(modules) > 1:
            most = MANY_EPOCHS * (epoch_steps or total_steps) / total_steps
            end, what = ALONE * min(1.0, most), "the last layer module trains alone"
            moves = (Move(0.0, len(modules) - 1), Move(round(end, 4) or end, 0), *moves)
        reason = f"pretrained: {what} up to {end:.0%} of the steps"
    return Plan(moves=moves, modules=tuple(modules), total_steps=total_steps, reason=reason)


def even_moves(num_modules: int, start: float) -> tuple[Move, ...]:
    """Return moves that freeze one layer module after the other, evenly from `start` on.

    Source: MosaicML Composer, `LayerFreezing`, which counts leaf layers by epochs.
    """
    last = num_modules - 1
    shares = [(depth, start + (1 - start) * depth / last) for depth in range(1, last)]
    # Cut after four digits: rounded up, a share could be later than its step.
    return tuple(Move(math.floor(1e4 * time + ROUNDING) / 1e4, depth) for depth, time in shares)


def find_plan(
    settings: PolicyConfig, modules: Sequence[str], total_steps: int | None, **facts: Any
) -> Plan | None:
    """Return the plan that settings give, name or leave to `draw_up`; None if they follow none."""
    if settings.name not in PLANNED:
        return None
    if settings.plan is not None:
        return Plan.parse(settings.plan, modules, total_steps)
    if settings.name == "linear":
        text = " ".join(map(str, even_moves(len(modules), settings.start)))
        return Plan.parse(text, modules, total_steps, "the even plan of policy 'linear'")
    return draw_up(modules, total_steps, **facts)


class PlanPolicy:
    """'plan', 'static', 'linear': follows a plan, to the step. 'none': a plan that never moves.

    A loss that is not finite, or twice that of the steps before and more than it ever was, thaws
    everything until the plan's next move. The first phase of a plan that was drawn up becomes
    longer in a long training whose loss falls far in the first epoch, where all samples are new.
    """

    def __init__(
        self,
        config: Config,
        *,
        modules: Sequence[str],
        deepest: int,
        total_steps: int | None,
        plan: Plan | None = None,
        epoch_steps: int | None = None,
        **_: Any,
    ) -> None:
        self._deepest = deepest
        self._loss, self._highest = math.inf, -math.inf  # of the newest steps judged, and of all
        self._losses = list[float | None]()  # of the steps since then
        self._thawed_at = -1  # the step at which the loss thawed, until the next move
        self.plan = plan or Plan.parse(config.policy.plan or "", modules, total_steps)
        is_long = epoch_steps and round((total_steps or 0) / epoch_steps) >= MANY_EPOCHS
        may_change = config.policy.plan is None and 0 in [move.depth for move in self.plan.moves]
        # The last step of the first epoch, until the loss there is judged; 0 if it is not.
        self._first_epoch = (epoch_steps or 0) if is_long and may_change else 0

    @property
    def wants(self) -> Wants:
        """The steps at which the plan changes what is frozen."""
        changes = (step for step in self.plan.steps if self._depth(step) != self._depth(step - 1))
        return Wants(steps=tuple(changes))

    def _depth(self, step: int) -> int:
        return min(self.plan.depth_at(step), self._deepest)

    def observe(self, interval: Interval) -> Depth | None:
        """Return the depth of the newest move, unless so many are frozen already."""
        step, total = interval.step, self.plan.total_steps
        if interval.num_steps and (reason := self._judge_loss(interval)) and interval.frozen:
            self._thawed_at = step
            return Depth(0, reason)
        if 0 < self._first_epoch <= step:
            self._first_epoch = 0
            if interval.frozen and 0 <= self._loss < FALLEN * self._highest:
                self._train_longer_alone()
        move = self.wants.next_step(self._thawed_at)
        depth = 0 if 0 <= self._thawed_at <= step < move else self._depth(step)
        # What was refused is not asked for again at the end of each interval.
        if depth == interval.frozen or (interval.num_steps and step not in self.wants.steps):
            return None
        done = f"{step / total:.1%} of the training is" if total else f"{step} steps are"
        what = f"{depth} layer module{'' if depth == 1 else 's'}" if depth else "nothing"
        return Depth(depth, f"{done} done, and the plan freezes {what} from here on")

    def _train_longer_alone(self) -> None:
        moves = [m if m.depth else m._replace(time=2 * m.time) for m in self.plan.moves]
        fell = f"fell from {self._highest:.3g} to {self._loss:.3g} within the first epoch"
        reason = f"the last layer module trains alone for longer: the training loss {fell}"
        self.plan = replace(self.plan, moves=tuple(moves), reason=reason)

    def _judge_loss(self, interval: Interval) -> str:
        """Take in the loss of an interval; return why it is no time to have anything frozen."""
        self._losses += [interval.loss] * interval.num_steps
        if len(self._losses) < JUDGED_STEPS:
            return ""
        losses = [loss for loss in self._losses if loss is not None]
        self._losses, before, highest = [], self._loss, self._highest
        if not losses:
            return "the training loss is not finite"
        loss = self._loss = fmean(losses)
        self._highest = max(highest, loss)
        if loss > before + abs(before) and loss > highest:
            return f"the training loss rose from {before:.3g} to {loss:.3g} within an interval"
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return the text of the plan, and what was seen of the loss."""
        seen = [self._loss, self._highest, self._thawed_at, self._first_epoch, *self._losses]
        return {"plan": str(self.plan), "seen": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what was seen of the loss; the policy was made with the plan of the state."""
        self._loss, self._highest, self._thawed_at, self._first_epoch, *self._losses = state["seen"]
