"""'worth': freezing, in a fine-tuning, what brings little for the time it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from egeria.policy.evidence import LossGuard
from egeria.policy.forecast import STRICTER, Forecast
from egeria.policy.protocol import BOOTSTRAPPING, FORESIGHT, PLASTICITY, WORTH, Decision, Interval
from egeria.policy.shares import (
    LATER_ERRORS,
    complete,
    harmed,
    helped,
    known_sum,
    telling,
    upper_share,
)

NOTHING = "nothing"
MEASURED = frozenset({FORESIGHT})
"""What is measured once worth decides."""

FIRST_LOOK_SHARE = 0.05
"""Share of the training in which worth is measured, if need be up to
`session.measuring.worth.MEASURED_SHARE`."""
SETTLED_SHARE = FIRST_LOOK_SHARE / 2
"""Share of the training after which shares are taken, where that leaves enough. While a fresh head
learns, what is before it has little to go by: of a ResNet-56 the first module brings 4 %, later
6."""
RARER = ((4, 1.8), (2, 6.0))
"""Periods, and up to how many times the limit of a freeze a front may be worth to be updated that
rarely: about as if leaving out a share `s` of the updates lost `s ** 2.5` of what all of them
bring. Where it was tried they lost more."""
HELD = 1.5
"""Times what makes an update rarer at which it becomes oftener again: the limit moves with the
loss, which scatters."""
FADING = 1.0
"""Power of the rate by which what steps bring fades. What a freeze costs then falls with the square
of the rate at which it comes: of what 48 schedules cost that leaves 9 % unexplained, the rate
itself 9, a cube 12 (record 0031)."""
COST_POWER = (FADING + 1) / FADING
"""Power by which what a freeze costs falls with the limit on its price, where the rate falls
straight to nothing: at a rate `r` it costs `r ** (FADING + 1)` of what it would cost at the
largest, and `r ** FADING` is limit / price."""
LOSS_SHARE = 0.05
"""Share of the training over which its loss is averaged, ever less of what is older."""
LIMIT_FACTORS = (0.5, 2.0)
"""Least and most that the loss makes of `policy.worth_limit`, which holds at a loss of 1. A part of
what steps bring costs ever less accuracy as less is wrong: 36 schedules of six fine-tunings lost
4.8 to 5.5 points (once 3.5) times that part times the root of the training loss at the end, in
nats; two not looked at before 4.9 and 1.0 (record 0031). For losses of other kinds and scales it is
a guess, hence no more than this."""
SMALL_LOSS, SMALL_LOSS_SHARE, MOST_OF_SMALL = 0.1, 0.05, 10.0
"""Loss, and share of the first one, under both of which there is more than the most, in proportion
up to that root, and the most of that. MiniLM on SST-2, whose loss falls from 0.7 to 0.1, loses as
much as it may at twice; in ten epochs of tags, whose loss falls from 2.8 to 0.02 by half of them, a
front that froze at two thirds lost 0.02 points (one seed, record 0041)."""
ROUNDING = 1e-9
LOOKS = 100
"""Intervals of a whole run once worth decides and no freeze is watched: only the learning rate
moves that any more."""
THAWS_AT = 2.0**FADING
"""Times the limit that a frozen front must be worth by now, because the rate rose to twice what it
was, to thaw."""


class FrontPart(NamedTuple):
    """Layer modules that freeze together: those behind what is frozen, before `end`."""

    end: int
    worth: float  # their share of what the steps of all but the last layer module bring
    time: float  # the share of an iteration that freezing them saves

    @property
    def price(self) -> float:
        """Worth for its time."""
        return self.worth / self.time if self.time > 0 else math.inf if self.worth > 0 else 0.0


class Worth(Forecast):
    """Freezes, of a model that came trained, what brings little for the time it takes; of others as
    'forecast' does.

    In the first steps of a fine-tuning all layer modules go one way, and by how much the steps of
    each lower the loss can be measured (`egeria.session.measuring.worth`). The front brings little:
    of MiniLM the embeddings, which take up to a fifth of the time, 1 to 2 % of what all but the
    last module bring. What steps bring fades with the learning rate. So the next front modules
    freeze when their share of it, faded, is under a limit times their share of an iteration: some
    at once, most while it falls. The limit is the one at which all that freezes costs
    `policy.worth_limit` of what is brought, if the rate falls straight to nothing; more where the
    training loss is small, less where it is large (`LIMIT_FACTORS`). Modules freeze together where
    those behind bring less for their time than those in front. With `policy.duty_cycle`, what is
    too dear to freeze is updated at every 4th or 2nd step only, where that is cheap enough.

    Nothing else is measured then, and no reference model made. Where what steps bring never stands
    out, nothing freezes: plasticity tells how much a module moves, not whether that helps. It
    decides, as in 'forecast', where all steps together go up the loss, too long for worth to mean
    anything, as when a training from scratch is continued. The loss guards a freeze as there, once
    it has been seen for some intervals; after an alarm nothing freezes before.

    Source: our own.
    """

    needs = Forecast.needs | {WORTH}
    _saved = (
        *Forecast._saved,
        "decides",
        "worths",
        "num_unsettled",
        "shares",
        "times",
        "num_pretrained",
        "loss",
        "first_loss",
        "rate_at_freeze",
    )

    def _prepare(self) -> None:
        super()._prepare()
        self._decides = ""
        """'plasticity' or 'worth'; 'nothing' while worth is measured, and '' before it is known
        whether it is."""
        self._worths: tuple[tuple[float | None, ...], ...] = ()
        self._num_unsettled = 0
        """How many of these are of steps in which a fresh head may learn nearly all there is."""
        self._shares: tuple[float | None, ...] = ()
        """For each layer module its share of what the steps of all but the last, which never
        freezes, brought."""
        self._times: tuple[float, ...] = ()
        """For each layer module the share of an iteration that a freeze of it saves."""
        self._num_pretrained = 0
        self._loss: float | None = None
        """The training loss of late."""
        self._first_loss: float | None = None
        """That of the first interval."""
        self._rate_at_freeze = 0.0
        """The learning rate at the newest freeze, as `_rate_share`."""

    @property
    def monitored(self) -> int | None:
        """The frontmost active module where plasticity decides, else None."""
        return super().monitored if self._decides == PLASTICITY else None

    @property
    def least_interval_steps(self) -> int:
        """Steps that an interval may have at least: a hundredth of the run where worth decides and
        nothing is watched.

        The loss guard goes by intervals: behind the first freezes it has those it began with.
        """
        is_calm = (
            self._decides == WORTH and self.stage != BOOTSTRAPPING and not self._guard.is_watching
        )
        return math.ceil((self._total_steps or 0) / LOOKS) if is_calm else 0

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Return what follows from the worth of steps, the loss and the rates."""
        if self._decides in ("", NOTHING):
            self._observe_worth(interval)
        elif self._decides == WORTH and self._rates.interval_steps:
            self._guard = self._guard.in_longer(
                (interval.step - self._rates.step) / self._rates.interval_steps
            )
        decisions = super().observe_interval(interval)
        self._observe_loss(interval)
        if self._decides != WORTH or self.stage == BOOTSTRAPPING:
            return decisions
        return (*decisions, *self._freeze_fronts(), *self._slow_fronts())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        super().load_state_dict(state)
        self._decide_by(self._decides)

    def steady_steps(self, step: int, interval_steps: int) -> float | None:
        """Return the number of steps until the next freeze, as far as the rate of a straight decay
        tells.
        """
        if self._decides != WORTH:
            return super().steady_steps(step, interval_steps)
        front = self._next_front(self._frozen)
        if front is None or self._total_steps is None:
            return None
        price = front.price * self._fading
        wait = 1 - (self._limit / price) ** (1 / FADING) if price > self._limit else 0.0
        return wait * max(0, self._total_steps - step)

    def _observe_worth(self, interval: Interval) -> None:
        """Gather what was measured, and judge it once the measuring has ended."""
        if interval.worth is not None:
            if any(part is not None for part in interval.worth):
                self._worths = (*self._worths, interval.worth)
                self._num_unsettled += self._is_within(SETTLED_SHARE, interval.step)
            self._times = interval.time_shares or self._times
            self._num_pretrained = interval.num_pretrained or 0
            self._decide_by(NOTHING)
        if self._decides == NOTHING and self._is_within(FIRST_LOOK_SHARE, interval.step):
            return
        rows = complete(self._worths)
        is_possible = bool(rows and self._times and self._num_pretrained)
        # Nothing of this interval was given to `super()` yet: its step is that of the one before.
        num_errors = 0.0 if self._is_within(FIRST_LOOK_SHARE, self._rates.step) else LATER_ERRORS
        shares: tuple[float | None, ...] = ()
        if is_possible and helped(rows, self._num_measured, num_errors):
            shares = self._find_shares(
                telling(self._worths, self._num_unsettled, self._num_measured)
            )
        if not is_possible or (interval.worth is None and harmed(rows)):
            self._decide_by(PLASTICITY)
        elif interval.worth is None or (shares and shares[0] is not None):
            self._shares = shares or (None,) * len(
                self._trainable
            )  # of what is not known nothing freezes
            self._decide_by(WORTH)
        else:  # a front whose own rate begins at 0, too, may yet show its worth
            self._decide_by(NOTHING)

    def _observe_loss(self, interval: Interval) -> None:
        if interval.loss is None or not self._total_steps:
            return
        self._first_loss = interval.loss if self._first_loss is None else self._first_loss
        before = interval.loss if self._loss is None else self._loss
        fresh = -math.expm1(-self._rates.interval_steps / (LOSS_SHARE * self._total_steps))
        self._loss = before + fresh * (interval.loss - before)

    def _is_within(self, share: float, step: int) -> bool:
        return self._total_steps is not None and step <= share * self._total_steps

    def _find_shares(self, rows: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
        """Return each layer module's share of what all that came trained but the last brought, as
        much as it may be.

        Empty where they brought nothing.
        """
        columns, wholes = (
            list(zip(*rows, strict=True)),
            [known_sum(row[: self._num_measured]) for row in rows],
        )
        total = math.fsum(max(0.0, known_sum(column)) for column in columns[: self._num_measured])
        if not total > 0:
            return ()
        found = [
            None if None in column else upper_share(column, wholes, total) for column in columns
        ]
        return tuple(
            share if trains else 0.0 for share, trains in zip(found, self._trainable, strict=True)
        )

    @property
    def _num_measured(self) -> int:
        """Layer modules by which worth is measured: of those that came trained all but the last."""
        return min(self._num_pretrained, len(self._trainable) - 1)

    def _decide_by(self, what: str) -> None:
        self._decides = what
        self.needs = self._needed()

    def _needed(self) -> frozenset[str]:
        found = {WORTH: MEASURED, NOTHING: MEASURED | {WORTH}, PLASTICITY: super()._needed()}
        return found.get(self._decides, Worth.needs)

    @property
    def _limit(self) -> float:
        """Worth for its time, as shares, under which the front freezes.

        After an alarm of the loss it is a quarter of what it was, and all freezes together may cost
        a quarter at most: where all that may freeze is worth so little that there was no limit,
        there is nothing else to take it of.
        """
        worth_limit, strictness = self._config.policy.worth_limit, self._strictness
        if strictness * worth_limit >= 1:  # all may be lost
            return math.inf
        fronts, budget = list(self._fronts()), self._limit_factor * worth_limit
        return min(
            strictness * _price_limit(fronts, budget), _price_limit(fronts, strictness * budget)
        )

    @property
    def _limit_factor(self) -> float:
        """How many times `policy.worth_limit` all freezes together may cost, by what is left of the
        loss.
        """
        if (
            self._loss is None or self._loss <= 0
        ):  # a loss that may fall below nothing does not say what is left
            return 1.0
        small = min(SMALL_LOSS, SMALL_LOSS_SHARE * (self._first_loss or 0.0))
        least, most = LIMIT_FACTORS
        most = min(MOST_OF_SMALL, most * max(1.0, small / self._loss))
        return min(most, max(least, 1 / math.sqrt(self._loss)))

    @property
    def _rate_share(self) -> float:
        """The learning rate, now or on average to come, as a share of its largest so far."""
        rates = self._rates
        if not rates.largest_rate or rates.remaining_rate_sum is None or self._total_steps is None:
            return 1.0
        to_come = rates.remaining_rate_sum / max(1, self._total_steps - rates.step)
        return min(1.0, max(rates.rate, to_come) / rates.largest_rate)

    @property
    def _fading(self) -> float:
        """What steps bring from now on, as a share of what they brought at the largest rate."""
        return (
            1.0 if self._rates.rose else self._rate_share**FADING
        )  # what it rises to is not known

    def _next_front(self, begin: int) -> FrontPart | None:
        """Return the layer modules from `begin` on that together bring least for the time they
        take.
        """
        best: FrontPart | None = None
        worth = time = 0.0
        for place in range(begin, min(self._deepest_freeze, self._num_pretrained)):
            share = self._shares[place]
            if share is None:
                break
            worth, time = worth + share, time + self._times[place]
            front = FrontPart(end=place + 1, worth=worth, time=time)
            if best is None or front.price <= best.price:
                best = front
        return best

    def _fronts(self, begin: int = 0) -> Iterator[FrontPart]:
        """Yield what freezes together, front to back, which is by rising price."""
        if front := self._next_front(begin):
            yield front
            yield from self._fronts(front.end)

    def _freeze_fronts(self) -> tuple[Decision, ...]:
        """Return the decisions that freeze all that is worth little enough by now."""
        is_unwatched = (
            self._strictness < 1 and not self._guard.is_ready
        )  # after an alarm none may be
        if is_unwatched or not self._is_early or self._rates.remaining_rate_sum is None:
            return ()
        begin, decisions = self._frozen, list[Decision]()
        at_loss = "" if self._loss is None else f", at a loss of {self._loss:.2g}"
        while (
            front := self._next_front(self._frozen)
        ) and front.price * self._fading < self._limit:
            reason = (
                f"at most {min(1.0, front.worth):.1%} of what all but the last layer module "
                "bring, faded to "
                f"{self._fading:.0%} with the learning rate, for {front.time:.0%} of an "
                f"iteration{at_loss}"
            )
            found = (*self._move_to(front.end, reason), *self._pass_over_untrainable())
            if not found:
                break
            decisions += found
        if self._frozen > begin:
            self._rate_at_freeze = self._rate_share
            self._guard = self._guard.await_freeze(self._frozen)
        return tuple(decisions)

    def _slow_fronts(self) -> tuple[Decision, ...]:
        """Return the decision that changes how often the front behind what is frozen is updated."""
        if not self._config.policy.duty_cycle or self._rates.remaining_rate_sum is None:
            return ()
        if not self._frozen and self._guard.excess is not None:
            self._strictness, self._guard = STRICTER * self._strictness, LossGuard()
        periods = [1] * self._frozen
        for period, factor in RARER:
            while front := self._next_front(len(periods)):
                held = HELD if self._periods[len(periods)] >= period else 1.0
                if front.price * self._fading >= held * factor * self._limit:
                    break
                periods += [period] * (front.end - len(periods))
        reason = f"what they bring for their time, faded to {self._fading:.0%} with the rate"
        found = self._update_every(periods, reason)
        if found and self._guard.is_ready:
            self._guard = replace(self._guard, since=())
        return found

    def _reason_to_thaw(self) -> str | None:
        reason = super()._reason_to_thaw()
        is_known = self._decides == WORTH and self._rates.remaining_rate_sum is not None
        if reason or not is_known or not self._frozen:
            return reason
        worth, time = (
            known_sum(self._shares[: self._frozen]),
            math.fsum(self._times[: self._frozen]),
        )
        rose = (
            self._rate_share > self._rate_at_freeze
        )  # the limit falls as well, where the loss rises
        if rose and worth * self._rate_share**FADING > THAWS_AT * self._limit * time:
            return f"the learning rate rose to {self._rate_share:.0%} of its highest"
        return None


def _price_limit(fronts: Sequence[FrontPart], worth_limit: float) -> float:
    """Return the limit on the price at which all freezes together cost `worth_limit`.

    Args:
        fronts: what freezes together, by rising price.
        worth_limit: share of what all but the last layer module bring.

    Returns:
        Infinity where freezing all of it from the beginning would cost no more.
    """
    spent = 0.0
    for index, front in enumerate(fronts):
        price = front.price
        if price > 0:
            if math.isinf(price):
                break
            at_this_price = math.fsum(
                later.worth * (price / later.price) ** COST_POWER for later in fronts[index:]
            )
            if spent + at_this_price > worth_limit * (1 + ROUNDING):
                share = (worth_limit - spent) / at_this_price
                return price * math.pow(share, 1 / COST_POWER)
        spent += front.worth  # it freezes at once
    return math.inf
