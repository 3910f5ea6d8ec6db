"""The policy of the paper: stages, the frozen prefix, and the window (algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from egeria.config import Config
from egeria.policy.bootstrap import Bootstrap
from egeria.policy.history import ModuleHistory
from egeria.policy.protocol import PLASTICITY
from egeria.policy.schedules import Moment, UnfreezeRule, Verdict
from egeria.policy.values import (
    BOOTSTRAPPING,
    KNOWLEDGE_GUIDED,
    Decision,
    EndBootstrapping,
    Freeze,
    Interval,
    Judgement,
    Reading,
    Thaw,
)


class EgeriaPolicy:
    """Algorithm 1 as `system.md` settles it: freezes from the front, thaws by the learning rate.

    Args:
        config: the settings of the run.
        trainable: for each layer module, front to back, whether it has any parameter to train.
            One without is passed over at once: there is nothing in it to wait for.
        rule: when to thaw.
        total_steps: optimizer steps of the run, None where unknown.
        deepest_freeze: at most this many front modules freeze; the last one never does.
    """

    needs = frozenset({PLASTICITY})

    def __init__(
        self,
        config: Config,
        *,
        trainable: Sequence[bool],
        rule: UnfreezeRule,
        total_steps: int | None = None,
        deepest_freeze: int | None = None,
    ) -> None:
        self._config = config
        self._trainable = tuple(trainable)
        self._rule = rule
        self._total_steps = total_steps
        last = len(self._trainable) - 1
        self._deepest = last if deepest_freeze is None else min(deepest_freeze, last)
        self._bootstrap = Bootstrap(change_threshold=config.bootstrapping.change_threshold)
        self._histories = tuple(self._new_history() for _ in self._trainable)
        self._stage = BOOTSTRAPPING
        self._frozen = 0
        self._window = config.plasticity.window
        self._learning_rate: float | None = None
        self._freeze_learning_rate: float | None = None
        self._on_hold = False

    @property
    def frozen(self) -> int:
        """How many front layer modules are frozen."""
        return self._frozen

    @property
    def stage(self) -> str:
        """Either 'bootstrapping' or 'knowledge-guided'."""
        return self._stage

    @property
    def window(self) -> int:
        """`W` as it stands now, in evaluations."""
        return self._window

    @property
    def monitored(self) -> int | None:
        """The frontmost active module `l`, or None: bootstrapping, on hold, or nothing left to freeze."""
        if self._stage == BOOTSTRAPPING or self._on_hold or self._frozen >= self._deepest:
            return None
        return self._frozen

    def observe_interval(self, interval: Interval) -> tuple[Decision, ...]:
        """Take in the loss and the learning rate of one interval."""
        verdict = self._rule.judge(self._moment(interval))
        self._learning_rate = interval.learning_rate
        self._on_hold = verdict is Verdict.HOLD
        if self._stage == BOOTSTRAPPING:
            return self._observe_bootstrapping(interval)
        if verdict in (Verdict.THAW, Verdict.RESTART) and self._frozen:
            return self._thaw(interval, restart=verdict is Verdict.RESTART)
        return self._pass_over_untrainable()

    def observe_reading(self, reading: Reading) -> Judgement:
        """Take in one reading; readings of a module no longer monitored change nothing."""
        if reading.module != self.monitored:
            return Judgement(smoothed=reading.value)
        history = self._histories[reading.module].observe(reading.value, self._window)
        self._remember(reading.module, history)
        decisions: tuple[Decision, ...] = ()
        if history.stationary >= self._window and self._config.freezing.enabled:
            reason = f"plasticity stationary for {history.stationary} evaluations"
            decisions = (self._freeze(reason), *self._pass_over_untrainable())
        return Judgement(
            smoothed=history.smoothed[-1],
            slope=history.slope,
            tolerance=history.tolerance,
            stationary=history.stationary,
            decisions=decisions,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain values."""
        return {
            "stage": self._stage,
            "frozen": self._frozen,
            "trainable": list(self._trainable),
            "deepest_freeze": self._deepest,
            "window": self._window,
            "bootstrap": asdict(self._bootstrap),
            "histories": [history.state_dict() for history in self._histories],
            "learning_rate": self._learning_rate,
            "freeze_learning_rate": self._freeze_learning_rate,
            "on_hold": self._on_hold,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._stage = state["stage"]
        self._frozen = state["frozen"]
        self._trainable = tuple(state["trainable"])
        self._deepest = state["deepest_freeze"]
        self._window = state["window"]
        self._bootstrap = Bootstrap(**state["bootstrap"])
        self._histories = tuple(map(ModuleHistory.from_state, state["histories"]))
        self._learning_rate = state["learning_rate"]
        self._freeze_learning_rate = state["freeze_learning_rate"]
        self._on_hold = state["on_hold"]

    def _new_history(self) -> ModuleHistory:
        freezing = self._config.freezing
        return ModuleHistory(tolerance_share=freezing.tolerance_share, tolerance_readings=freezing.tolerance_readings)

    def _moment(self, interval: Interval) -> Moment:
        return Moment(
            step=interval.step,
            total_steps=self._total_steps,
            frozen=self._frozen,
            learning_rate=interval.learning_rate,
            previous_learning_rate=self._learning_rate,
            freeze_learning_rate=self._freeze_learning_rate,
        )

    def _observe_bootstrapping(self, interval: Interval) -> tuple[Decision, ...]:
        self._bootstrap = self._bootstrap.observe(interval.loss)
        if not self._bootstrap.is_over:
            return ()
        self._stage = KNOWLEDGE_GUIDED
        change, threshold = self._bootstrap.change, self._bootstrap.change_threshold
        ended = EndBootstrapping(reason=f"the loss changed by {change:.1%} in an interval, less than {threshold:.0%}")
        return (ended, *self._pass_over_untrainable())

    def _freeze(self, reason: str) -> Freeze:
        module = self._frozen
        if self._freeze_learning_rate is None and self._trainable[module]:
            self._freeze_learning_rate = self._learning_rate
        self._remember(module, self._histories[module].restarted())
        self._frozen += 1
        return Freeze(module=module, reason=reason)

    def _pass_over_untrainable(self) -> tuple[Freeze, ...]:
        passed = []
        while self._config.freezing.enabled and self.monitored is not None and not self._trainable[self._frozen]:
            passed.append(self._freeze("it has no parameters to train"))
        return tuple(passed)

    def _thaw(self, interval: Interval, *, restart: bool) -> tuple[Thaw]:
        before = self._freeze_learning_rate
        full = self._config.plasticity.window
        self._window = full if restart else max(self._config.unfreezing.minimum_window, self._window // 2)
        self._frozen = 0
        self._freeze_learning_rate = None
        self._histories = tuple(history.restarted() for history in self._histories)
        moved = "risen" if restart else "fallen"
        reason = f"the learning rate has {moved} from {before:g} to {interval.learning_rate:g} since the first freeze"
        return (Thaw(reason=reason, window=self._window),)

    def _remember(self, module: int, history: ModuleHistory) -> None:
        self._histories = (*self._histories[:module], history, *self._histories[module + 1 :])
