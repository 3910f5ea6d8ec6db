"""'egeria': the policy of the paper, which freezes front layer modules of stationary plasticity.

The paper thaws when the learning rate has fallen tenfold (§4.2.2), which is for annealing in steps.
Beyond that, nothing freezes while it rises, a later rise thaws, and a smooth decay not too late.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import linear_regression
from typing import Any, Literal, Protocol

from egeria.config import Config, FreezingConfig, require
from egeria.policy.base import BOOTSTRAPPING, KNOWLEDGE_GUIDED, Depth, Interval, Status, Wants

DEFAULT_INTERVAL_STEPS = 100
# Bootstrapping, smoothing and the halved window after a thaw, in passes over all modules (§4.2.2).
PASSES = 1 + 0.5 + 0.25


@dataclass(slots=True)
class ModuleHistory:
    """The plasticity of one layer module since it was first read.

    Source: eq. 2 (the printed sum has one term too many: exactly `window` readings are averaged),
    algorithm 1 (the printed test is signed; the prose means the absolute slope), §4.2.2.
    """

    readings: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    early_slopes: list[float] = field(default_factory=list)
    slope: float | None = None  # once `window` smoothed values are there
    tolerance: float | None = None  # `T`, once all early slopes are known
    stationary: int = 0  # evaluations in a row, up to the newest

    def observe(self, value: float, window: int, settings: FreezingConfig) -> None:
        """Add a reading."""
        self.readings = [*self.readings, value][-window:]
        self.smoothed = [*self.smoothed, sum(self.readings) / len(self.readings)][-window:]
        if len(self.smoothed) < window:
            return
        self.slope = linear_regression(range(window), self.smoothed).slope
        self.early_slopes = [*self.early_slopes, self.slope][: settings.tolerance_readings]
        if len(self.early_slopes) == settings.tolerance_readings:
            self.tolerance = settings.tolerance_share * max(map(abs, self.early_slopes))
        # No movement at all is stationary whatever the tolerance, which may itself be zero.
        is_stationary = self.slope == 0 or abs(self.slope) < (self.tolerance or 0)
        self.stationary = self.stationary + 1 if is_stationary and self.tolerance is not None else 0


@dataclass(slots=True)
class State:
    """What `EgeriaPolicy` keeps from one question to the next."""

    window: int  # `W` as it is now
    histories: list[ModuleHistory]
    stage: str = BOOTSTRAPPING
    reason: str = ""  # why the stage began
    candidate: int | None = None  # the layer module whose plasticity is wanted
    refresh: bool = False
    evaluations: int | None = None  # asked for since the reference was due; None before the first
    loss: float | None = None  # of the newest interval that had one, while bootstrapping
    learning_rate: float | None = None  # of the newest interval
    first_rate: float | None = None  # learning rate when the first with anything to train froze


class EgeriaPolicy:
    """Freezes by stationary plasticity, thaws by the learning rate (algorithm 1 and §4.2.2)."""

    def __init__(
        self,
        config: Config,
        *,
        modules: Sequence[str],
        trainable: Sequence[bool],
        deepest: int,
        total_steps: int | None,
        lr_rule: "UnfreezeRule",
    ) -> None:
        self._config, self._trainable, self._deepest = config, trainable, deepest
        self._total_steps, self._rule = total_steps, lr_rule
        self._interval_steps = choose_interval(config, total_steps, len(modules))
        self._state = State(config.plasticity.window, [ModuleHistory() for _ in modules])
        self.status = Status(BOOTSTRAPPING, window=config.plasticity.window)

    @property
    def wants(self) -> Wants:
        """Readings of the frontmost active layer module, once bootstrapping is over."""
        state, steps = self._state, self._interval_steps
        return Wants(plasticity_of=state.candidate, refresh=state.refresh, interval_steps=steps)

    def observe(self, interval: Interval) -> Depth | None:
        """Return the depth after an interval, or after a reading of the module that is wanted."""
        state, decision, judged = self._state, None, ModuleHistory()
        if interval.num_steps:
            was_wanted = state.candidate is not None
            decision = self._end_interval(interval)
            state.refresh = interval.loss is not None and self._count_evaluation(was_wanted)
        for reading in interval.readings:
            # What is wanted differs from what is frozen where the newest depth was refused.
            frozen = interval.frozen if decision is None else decision.frozen
            if reading.module == state.candidate == frozen:
                judged = state.histories[frozen]
                judged.observe(reading.value, state.window, self._config.freezing)
                if judged.stationary >= state.window:
                    reason = f"plasticity stationary for {judged.stationary} evaluations"
                    decision = self._move_on(frozen, frozen + 1, reason)
        smoothed = judged.smoothed[-1] if judged.smoothed else None
        now = (smoothed, judged.slope, judged.tolerance, judged.stationary)
        self.status = Status(state.stage, state.reason, state.window, *now)
        return decision

    def _end_interval(self, interval: Interval) -> Depth | None:
        state, frozen, rate = self._state, interval.frozen, interval.learning_rate
        before = state.learning_rate if state.first_rate is None else state.first_rate
        state.first_rate = before if any(self._trainable[:frozen]) else None
        rates = (rate, state.learning_rate, state.first_rate)
        now = Moment(interval.step, self._total_steps, frozen, *rates)
        action, state.learning_rate = self._rule.judge(now), rate
        if state.stage == BOOTSTRAPPING:
            self._observe_loss(interval.loss)
        elif action in ("thaw", "restart") and frozen:
            return self._thaw(rate, is_restart=action == "restart")
        if state.stage == BOOTSTRAPPING or action == "hold":
            state.candidate = None
            return None
        return self._move_on(frozen, frozen, "it has no parameters to train")

    def _observe_loss(self, loss: float | None) -> None:
        """End bootstrapping where the loss has come close to that of the interval before."""
        state, threshold = self._state, self._config.bootstrapping.change_threshold
        before, state.loss = state.loss, state.loss if loss is None else loss
        if before is None or loss is None:
            return
        change = abs(before - loss) / (abs(before) or abs(loss) or 1)
        if change < threshold:
            state.stage = KNOWLEDGE_GUIDED
            share = f"{change:.1%} in an interval, less than {threshold:.0%}"
            state.reason = f"the loss changed by {share}"

    def _move_on(self, before: int, frozen: int, reason: str) -> Depth | None:
        """Pass over modules with nothing to train; return the depth if it is a new one."""
        while frozen < self._deepest and not self._trainable[frozen]:
            frozen += 1
        self._state.candidate = frozen if frozen < self._deepest else None
        return None if frozen == before else Depth(frozen, reason)

    def _thaw(self, rate: float, *, is_restart: bool) -> Depth:
        state, before = self._state, self._state.first_rate
        halved = max(self._config.unfreezing.minimum_window, state.window // 2)
        state.window = self._config.plasticity.window if is_restart else halved
        state.candidate, state.first_rate = 0, None
        for history in state.histories:  # early slopes stay: those of the module's fast early phase
            history.readings, history.smoothed, history.slope, history.stationary = [], [], None, 0
        # A user's rule may thaw where only modules without anything to train were frozen.
        rates = "" if before is None else f" from {before:g} to {rate:g}"
        moved = "risen" if is_restart else "fallen"
        return Depth(0, f"the learning rate has {moved}{rates} since the first freeze")

    def _count_evaluation(self, was_wanted: bool) -> bool:
        """Count the evaluation of this interval; return whether the reference is due after it."""
        state = self._state
        if state.candidate is None:
            return False
        count = None if state.evaluations is None else state.evaluations + was_wanted
        is_due = count is None or count >= state.window
        state.evaluations = 0 if is_due else count
        return is_due

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values."""
        return asdict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        histories = [ModuleHistory(**history) for history in state["histories"]]
        self._state = State(**{**state, "histories": histories})
        self.status = Status(self._state.stage, self._state.reason, self._state.window)


def choose_interval(config: Config, total_steps: int | None, num_modules: int) -> int:
    """Return `n`, the steps between evaluations: by the guideline of the paper, §4.2.2."""
    if config.plasticity.interval_steps is not None:
        return config.plasticity.interval_steps
    if total_steps is None:
        return DEFAULT_INTERVAL_STEPS
    return max(1, round(total_steps / (2 * config.plasticity.window) / num_modules / PASSES))


# What the learning rate asks for: to freeze what is stationary; to freeze nothing for now; to thaw
# everything and freeze again with half the window; to thaw everything and go back to the full one.
UnfreezeAction = Literal["go", "hold", "thaw", "restart"]


@dataclass(frozen=True, slots=True)
class Moment:
    """What an unfreeze rule may look at, once in each interval."""

    step: int
    total_steps: int | None
    frozen: int
    learning_rate: float
    previous_learning_rate: float | None  # one interval ago
    freeze_learning_rate: float | None  # at the first freeze of anything to train; None: none is


class UnfreezeRule(Protocol):
    """Decides from the learning rate when to thaw."""

    def judge(self, moment: Moment) -> UnfreezeAction:
        """Return what to do, by the moment alone, so that a run can be replayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleRule:
    """Thaws when the rate has fallen, or risen, far enough since the first freeze."""

    drop_factor: float | None = 10.0  # fall of the rate that thaws; None: no fall does
    rise_factor: float | None = 2.0  # rise that thaws and restores the full window; None: none does
    minimum_remaining: float = 0.0  # share of the run that must be left for a fall to thaw

    def judge(self, moment: Moment) -> UnfreezeAction:
        """Return what the rate asks for at this moment."""
        now, before = moment.learning_rate, moment.freeze_learning_rate
        # A rate that stays at 0 has neither risen nor fallen: 0 is twice 0, and a tenth of it.
        if moment.frozen and before is not None and now != before:
            if self.rise_factor is not None and now >= before * self.rise_factor:
                return "restart"
            remaining = max(0.0, 1 - moment.step / moment.total_steps) if moment.total_steps else 1
            # Schedulers multiply in floating point: 0.1 * 0.1 must be a fall by ten from 0.1.
            has_dropped = self.drop_factor and now * self.drop_factor <= before * (1 + 1e-6)
            if has_dropped and remaining >= self.minimum_remaining:
                return "thaw"
        previous = moment.previous_learning_rate
        return "hold" if previous is not None and now > previous else "go"


_SMOOTH, _UP_AND_DOWN = ScheduleRule(minimum_remaining=0.1), ScheduleRule(drop_factor=None)
RULES: dict[str, ScheduleRule] = {
    **dict.fromkeys(("step", "inverse_sqrt"), ScheduleRule()),
    **dict.fromkeys(("exponential", "linear", "cosine", "one_cycle"), _SMOOTH),
    **dict.fromkeys(("warm_restarts", "cyclic"), _UP_AND_DOWN),
    # The rate is flat until the short decay, in which every layer anneals: thaw when it has begun.
    "warmup_stable_decay": ScheduleRule(drop_factor=2.0, minimum_remaining=0.05),
    "never": ScheduleRule(drop_factor=None, rise_factor=None),
}

# Fragments of the names of schedulers, and of the functions LambdaLR is given, the most specific
# first, and the rules that they mean.
_FRAGMENTS = {
    "restart": "warm_restarts",
    "cyclic": "cyclic",
    "onecycle": "one_cycle",
    "wsd": "warmup_stable_decay",
    "stable_decay": "warmup_stable_decay",
    "inverse_sqrt": "inverse_sqrt",
    "cosine": "cosine",
    "exponential": "exponential",
    "polynomial": "linear",
    "linear": "linear",
    "steplr": "step",
    "plateau": "step",
}


def rule_for_schedule(names: Sequence[str]) -> str:
    """Return the name of the rule for a schedule, by the names of its classes and functions."""
    found = "step"  # the paper's; the last known name wins: sequences end with what anneals
    for name in map(str.lower, names):
        found = next((rule for part, rule in _FRAGMENTS.items() if part in name), found)
    return found


def find_rule(rule: Any, drop_factor: float | None = None) -> UnfreezeRule:
    """Return a built-in rule by its name, with its own or another factor, or the user's object."""
    if not isinstance(rule, str):
        return rule  # type: ignore[no-any-return]
    contract = f"'auto', {', '.join(map(repr, RULES))} or an object with a `judge` method"
    require(rule in RULES, "unfreezing.rule", contract, rule)
    return RULES[rule] if drop_factor is None else replace(RULES[rule], drop_factor=drop_factor)
