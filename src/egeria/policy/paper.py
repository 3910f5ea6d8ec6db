"""'egeria': the policy of the paper, which freezes front layer modules of stationary plasticity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from egeria.config import Config, FreezingConfig
from egeria.policy.base import BOOTSTRAPPING, KNOWLEDGE_GUIDED, Depth, Interval, Status, Wants
from egeria.policy.schedules import Moment, UnfreezeRule

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
        self.slope = least_squares_slope(self.smoothed)
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
        lr_rule: UnfreezeRule,
    ) -> None:
        self._config, self._trainable, self._deepest = config, trainable, deepest
        self._total_steps, self._rule = total_steps, lr_rule
        self._interval_steps, _ = choose_interval(config, total_steps, len(modules))
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


def least_squares_slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through equally spaced values, per evaluation."""
    count = len(values)
    centre, mean = (count - 1) / 2, sum(values) / count
    covariance = sum((index - centre) * (value - mean) for index, value in enumerate(values))
    return covariance / (count * (count * count - 1) / 12)


def choose_interval(config: Config, total_steps: int | None, num_modules: int) -> tuple[int, str]:
    """Return `n`, the steps between evaluations, and why: by the guideline of the paper, §4.2.2."""
    window = config.plasticity.window
    if config.plasticity.interval_steps is not None:
        return config.plasticity.interval_steps, "set in plasticity.interval_steps"
    if total_steps is None:
        reason = "default: give attach total_steps to derive it from the length of the run"
        return DEFAULT_INTERVAL_STEPS, reason
    steps = round(total_steps / (2 * window) / num_modules / PASSES)
    reason = f"guideline: {total_steps} steps / (2 x {window}) / {num_modules} modules / {PASSES}"
    return max(1, steps), reason
