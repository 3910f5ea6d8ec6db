"""Replaying a journal: the decisions its readings lead to, under its own settings or others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from egeria import events
from egeria.config import Config
from egeria.errors import JournalError
from egeria.policy import (
    FORESIGHT,
    GRADIENTS,
    NOISE,
    PLASTICITY,
    POLICIES,
    PREDICTION,
    WEIGHTS,
    WORTH,
    EndBootstrapping,
    Freeze,
    Interval,
    Policy,
    Reading,
    SetPeriods,
    Thaw,
    find_policy,
    find_rule,
    with_metric_of_policy,
)
from egeria.report.history import History, read_history, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedDecision:
    """One decision, of a run or of its replay."""

    step: int
    kind: str
    """'knowledge-guided', 'freeze', 'thaw' or 'periods'; or that the run stopped deciding, for
    good."""
    module: int | None
    """Which layer module froze."""
    periods: tuple[int, ...] | None = None
    """For each layer module, every how many optimizer steps it was to be updated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What a run decided, and what the same evidence decides now."""

    recorded: tuple[ReplayedDecision, ...]
    replayed: tuple[ReplayedDecision, ...]
    module_names: tuple[str, ...]
    num_unused: int
    """Readings of a module that the replay was not waiting for."""
    waiting_since: int | None
    """Step from which the replay wanted what the run did not measure, such as readings of a module
    that was frozen then; None if it never lacked."""

    @property
    def agrees(self) -> bool:
        """Whether both decided alike."""
        return self.recorded == self.replayed


def replay(directory: str | Path, config: Config | None = None) -> Replay:
    """Feed the losses, rates and readings of a journal to a fresh policy.

    A run reads only the module it monitors. Other settings may freeze earlier, and then skip
    readings, or later, and then lack them: the replay says so and decides nothing it has no reading
    for. Where a run stopped freezing for good, a replay with its own settings ends too.

    Args:
        directory: the run's directory.
        config: settings to try; None for the run's own. How often the run was evaluated cannot
            change.

    Raises:
        JournalError: the journal has no run, or not the beginning of one.
    """
    history = read_history(directory)
    started = history.last(events.RunStarted)
    if started is None or history.first_step:
        raise JournalError(
            "A replay needs run_started, the first event of a run, and the journal in "
            f"{directory} has none. "
            "A run resumed into a new directory begins in the old one: resume into the same one "
            "to keep it whole."
        )
    if "plasticity" not in started.config:
        raise JournalError(
            "A replay needs the settings of a run of `egeria.attach`, and the journal in "
            f"{directory} has none: it is "
            f"of plain training, which decided nothing. Choose the directory of another run."
        )
    ended = next(filter(_ends_freezing, history.events), None) if config is None else None
    if ended is not None:
        history = replace(history, events=history.events[: history.events.index(ended) + 1])
    cut = history.last(events.ModulesOrdered) or started
    replayed, num_unused, waiting_since = _feed(
        _policy(started, cut, config), history, started, config
    )
    recorded = [entry for event in history.events for entry in _decisions(event.step, [event])]
    if ended is not None:  # what it decided then, and did not record, was refused
        replayed = [entry for entry in replayed if entry.step < ended.step or entry in recorded]
        replayed += _decisions(ended.step, [ended])
    return Replay(
        recorded=tuple(recorded),
        replayed=tuple(replayed),
        module_names=tuple(module["name"] for module in cut.modules),
        num_unused=num_unused,
        waiting_since=waiting_since,
    )


def _feed(
    policy: Policy, history: History, started: events.RunStarted, config: Config | None
) -> tuple[list[ReplayedDecision], int, int | None]:
    """Return what the policy decides, the number of readings it had no use for, and since when it
    lacks some.
    """
    measured = _measured(history, started)
    # Intervals in a row in which the run looked at nothing and the replay would have. Under its own
    # settings a replay lacks what the run lacked, and decides the same without it.
    most_unread = math.inf if config is None else _settings_of(started).controller.queue_length
    replayed: list[ReplayedDecision] = []
    unused, unread, waiting_since = 0, 0, None
    for event in history.events:
        if isinstance(event, events.IntervalMeasured):
            if waiting_since is None and (unread > most_unread or _lacks(policy, event, measured)):
                waiting_since = event.step
            # What other settings freeze was not frozen in the run.
            interval = (
                Interval.of(event) if config is None else replace(Interval.of(event), frozen=None)
            )
            replayed += _decisions(event.step, policy.observe_interval(interval))
            unread = 0 if PLASTICITY not in policy.needs or policy.monitored is None else unread + 1
        elif isinstance(event, events.PlasticityRead):
            unread = 0
            if event.module == policy.monitored:
                replayed += _decisions(
                    event.step, policy.observe_reading(_reading(event)).decisions
                )
                continue
            unused += 1
            if (
                waiting_since is None
                and policy.monitored is not None
                and event.module > policy.monitored
            ):
                waiting_since = event.step
    return replayed, unused, waiting_since


def _policy(
    started: events.RunStarted,
    cut: events.RunStarted | events.ModulesOrdered,
    config: Config | None,
) -> Policy:
    settings = with_metric_of_policy(config or _settings_of(started))
    rule = settings.unfreezing.rule
    return find_policy(settings.policy.name)(
        settings,
        trainable=cut.trainable,
        rule=find_rule(started.rule if rule == "auto" else rule, settings.unfreezing.drop_factor),
        total_steps=started.total_steps,
        deepest_freeze=cut.deepest_freeze,
    )


def _settings_of(started: events.RunStarted) -> Config:
    """Return the settings of a run, without a metric object: a replay computes nothing. It misses a
    rule object.
    """
    plasticity = {
        key: value for key, value in started.config["plasticity"].items() if key != "metric"
    }
    return Config.from_dict({**started.config, "plasticity": plasticity})


def _measured(history: History, started: events.RunStarted) -> frozenset[str]:
    """Return what the run measured, at times at least, or would have recorded had there been
    anything.
    """
    own: frozenset[str] = getattr(
        POLICIES.get(setting(started, "policy", "name")), "needs", frozenset()
    )
    intervals = history.of(events.IntervalMeasured)
    seen = {
        PLASTICITY: history.of(events.PlasticityRead),
        NOISE: any(event.noise for event in intervals),
        WORTH: any(event.worth for event in intervals),
        FORESIGHT: any(event.way_ahead is not None for event in intervals),
    }
    return own & {NOISE, FORESIGHT, WORTH} | {need for need, found in seen.items() if found}


def _lacks(policy: Policy, event: events.IntervalMeasured, measured: frozenset[str]) -> bool:
    """Return whether the policy needs something that the run did not measure in this interval."""
    wanted = policy.needs if policy.monitored is not None else policy.needs - {PLASTICITY}
    here = {
        GRADIENTS: event.gradients,
        WEIGHTS: event.weight_changes,
        PREDICTION: event.freeze_scores,
    }
    return not wanted <= measured | {need for need, found in here.items() if found is not None}


def _reading(event: events.PlasticityRead) -> Reading:
    return Reading(**{field.name: getattr(event, field.name) for field in fields(Reading)})


_ENDINGS = ("freezing", "freezing and thawing any further")
"""What is declined where nothing is decided any more."""


def _ends_freezing(event: object) -> bool:
    """Return whether a run that could freeze stopped doing so, for good."""
    return isinstance(event, events.Declined) and event.step > 0 and event.what in _ENDINGS


_KINDS: dict[type, str] = {
    **dict.fromkeys((EndBootstrapping, events.StageChanged), "knowledge-guided"),
    **dict.fromkeys(
        (Freeze, events.ModuleFrozen, events.FreezeWaits, events.LandingBegan), "freeze"
    ),
    **dict.fromkeys((Thaw, events.Thawed), "thaw"),
    **dict.fromkeys((SetPeriods, events.PeriodsChanged), "periods"),
}
"""What the decisions of a policy, and the events that record them, are called here."""


def _kind_of(found: object) -> str | None:
    return "the end of freezing" if _ends_freezing(found) else _KINDS.get(type(found))


def _decisions(step: int, found: Sequence[object]) -> list[ReplayedDecision]:
    """Return the decisions among events, without what follows from earlier ones, or among what a
    policy returned.
    """
    return [
        ReplayedDecision(
            step=step,
            kind=kind,
            module=getattr(decision, "module", None) if kind == "freeze" else None,
            periods=tuple(getattr(decision, "periods", ())) or None,
        )
        for decision in found
        if (kind := _kind_of(decision)) is not None
        and getattr(decision, "decided_at", None) is None
    ]
