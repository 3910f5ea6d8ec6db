"""Why nothing was frozen: the first reason that holds, from the journal alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from egeria.events import (
    Declined,
    IntervalMeasured,
    ModuleFrozen,
    PlasticityRead,
    ReadingDropped,
    Resumed,
    RunStarted,
    StageChanged,
    Thawed,
)
from egeria.policy import KNOWLEDGE_GUIDED, POLICIES, first_stage
from egeria.report.history import History


def why_nothing_froze(history: History) -> str | None:
    """Return a sentence on why the run froze nothing; None where it did freeze."""
    if history.of(ModuleFrozen) or any(event.frozen for event in history.of(Resumed)):
        return None
    start = history.last(RunStarted)
    if start is None:
        return "The journal does not say how the run began: its first lines are missing or damaged."
    declined = next((event.reason for event in history.of(Declined) if event.what == "freezing"), None)
    if declined is not None:
        return f"Nothing was frozen: the library declined to. {declined}"
    reason = _setting_reason(history, start) or _stage_reason(history, start) or _reading_reason(history, start)
    return f"Nothing was frozen: {reason}{_declined(history)}"


def _setting_reason(history: History, start: RunStarted) -> str | None:
    if _setting(start, "freezing", "enabled") is False:
        return "freezing is switched off (freezing.enabled = false), so the run only watched."
    policy = _setting(start, "policy", "name")
    if policy == "none":
        return "the policy 'none' freezes nothing: it is the plain run to compare with."
    if start.deepest_freeze <= 0:
        return f"with {len(start.modules)} layer module(s) there is none in front of the last, which never freezes."
    if policy in POLICIES and first_stage(policy) == KNOWLEDGE_GUIDED:
        last_step = max(event.step for event in history.events)
        return f"the policy {policy!r} had no module to freeze up to step {last_step}, where the journal ends."
    return None


def _stage_reason(history: History, start: RunStarted) -> str | None:
    intervals = history.of(IntervalMeasured)
    if not intervals:
        last_step = max(event.step for event in history.events)
        return (
            f"no interval was completed. An interval is {start.interval_steps} steps, and the journal ends at "
            f"step {last_step}."
        )
    if any(isinstance(event, (StageChanged, PlasticityRead)) for event in history.events):
        return None
    threshold = _setting(start, "bootstrapping", "change_threshold")
    rule = f"by less than {threshold:.0%} " if isinstance(threshold, (int, float)) else "little enough "
    return (
        f"the run is still bootstrapping. After {len(intervals)} intervals of {start.interval_steps} steps the mean "
        f"loss has not yet changed {rule}from one interval to the next."
    )


def _reading_reason(history: History, start: RunStarted) -> str:
    readings = history.of(PlasticityRead)
    drops = history.of(ReadingDropped)
    if _setting(start, "policy", "name") == "forecast" and readings:
        limits = (_setting(start, "policy", "limit"), _setting(start, "policy", "loss_limit"))
        return _forecast_reason(readings, *limits)
    if _setting(start, "policy", "name") == "weight_change":
        return "the weights of the front module never changed by a steady amount for long enough."
    if not readings and not drops:
        return "bootstrapping ended, but no evaluation followed before the journal ends."
    if not readings:
        reason, count = Counter(drop.reason for drop in drops).most_common(1)[0]
        return f"none of {len(drops)} evaluations gave a usable reading; {count} of them: {reason}."
    longest = max(readings, key=lambda reading: reading.stationary)
    if longest.stationary == 0:
        return f"“{longest.name}” was never stationary (readings: {len(readings)}): it was still learning."
    return (
        f"“{longest.name}” was never stationary for long enough. Its longest row was {longest.stationary} "
        f"of the {_patience(history, start)} evaluations that it takes (readings: {len(readings)})."
    )


def _forecast_reason(readings: Sequence[PlasticityRead], limit: object, loss_limit: object) -> str:
    foreseen = [reading for reading in readings if reading.change_ahead is not None]
    if not foreseen:
        return (
            "what the modules would still change was never known. It takes some readings since the last decay of "
            "the learning rate, and a `scheduler` that says what the rate will be."
        )
    least = min(foreseen, key=lambda reading: reading.change_ahead or 0.0)
    said = (
        f"“{least.name}” would have changed by {least.change_ahead:.2g} at least to the end (limit: {limit}, "
        f"readings: {len(readings)})"
    )
    losses = [reading.loss_ahead for reading in foreseen if reading.loss_ahead is not None]
    if not losses:
        return f"{said}."
    return f"{said}, and kept {min(losses):.2g} of the loss, or of its fall so far, at least (limit: {loss_limit})."


def _patience(history: History, start: RunStarted) -> str:
    thaw = history.last(Thawed)
    patience = thaw.window if thaw is not None else _setting(start, "plasticity", "window")
    return str(patience) if isinstance(patience, int) else "consecutive"


def _declined(history: History) -> str:
    reasons = dict.fromkeys(f"{event.what} ({event.reason})" for event in history.of(Declined))
    return f" The library declined: {'; '.join(reasons)}." if reasons else ""


def _setting(start: RunStarted, group: str, name: str) -> Any:
    settings = start.config.get(group)
    return settings.get(name) if isinstance(settings, dict) else None
