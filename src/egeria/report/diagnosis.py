"""Why nothing was frozen: the first reason that holds, from the journal alone."""

from __future__ import annotations

from collections import Counter

from egeria import events
from egeria.policy import KNOWLEDGE_GUIDED, POLICIES, first_stage
from egeria.report.history import History, setting


def why_nothing_froze(history: History) -> str | None:
    """Return a sentence on why the run froze nothing; None where it did freeze."""
    resumed = history.of(events.Resumed)
    if history.of(events.ModuleFrozen) or any(event.frozen for event in resumed):
        return None
    start = history.last(events.RunStarted)
    if start is None:
        return "The journal does not say how the run began: its first lines are missing or damaged."
    declined = history.of(events.Declined)
    for event in declined:
        if event.what == "freezing":
            return f"Nothing was frozen: the library declined to. {event.reason}"
    reason = (
        _setting_reason(history, start)
        or _stage_reason(history, start)
        or _reading_reason(history, start)
    )
    also = "; ".join(dict.fromkeys(f"{event.what} ({event.reason})" for event in declined))
    return f"Nothing was frozen: {reason}" + (f" The library declined: {also}." if also else "")


def _setting_reason(history: History, start: events.RunStarted) -> str | None:
    if setting(start, "freezing", "enabled") is False:
        return "freezing is switched off (freezing.enabled = false), so the run only watched."
    cut = history.last(events.ModulesOrdered) or start
    if cut.deepest_freeze <= 0 and len(cut.modules) > 1:  # what was declined follows, and says why
        return f"none of its {len(cut.modules)} layer modules may freeze."
    if cut.deepest_freeze <= 0:
        return (
            f"with {len(cut.modules)} layer module(s) there is none in front of the last, "
            "which never freezes."
        )
    return _policy_reason(history, setting(start, "policy", "name"))


def _policy_reason(history: History, policy: object) -> str | None:
    if policy == "none":
        return "the policy 'none' freezes nothing: it is the plain run to compare with."
    plan = history.last(events.PlanMade)
    if plan is not None and not plan.plan:
        return f"{plan.reason}."
    if policy in POLICIES and first_stage(policy) == KNOWLEDGE_GUIDED:
        return (
            f"the policy {policy!r} had no module to freeze up to step {history.last_step}, "
            "where the journal ends."
        )
    return None


def _stage_reason(history: History, start: events.RunStarted) -> str | None:
    num_intervals = len(history.of(events.IntervalMeasured))
    if num_intervals == 0:
        return (
            f"no interval was completed. An interval is {start.interval_steps} steps, and the "
            "journal ends at "
            f"step {history.last_step}."
        )
    if history.last(events.StageChanged) or history.last(events.PlasticityRead):
        return None
    threshold = setting(start, "bootstrapping", "change_threshold")
    rule = (
        f"by less than {threshold:.0%} "
        if isinstance(threshold, (int, float))
        else "little enough "
    )
    return (
        f"the run is still bootstrapping. After {num_intervals} intervals of "
        f"{start.interval_steps} steps the mean "
        f"loss has not yet changed {rule}from one interval to the next."
    )


def _reading_reason(history: History, start: events.RunStarted) -> str:
    readings, drops = history.of(events.PlasticityRead), history.of(events.ReadingDropped)
    if not readings and not drops:
        return "bootstrapping ended, but no evaluation followed before the journal ends."
    if not readings:
        reason, count = Counter(drop.reason for drop in drops).most_common(1)[0]
        return f"none of {len(drops)} evaluations gave a usable reading; {count} of them: {reason}."
    longest = max(readings, key=lambda reading: reading.stationary)
    if longest.stationary == 0:
        return (
            f"“{longest.name}” was never stationary (readings: {len(readings)}): it was still "
            "learning."
        )
    thaw = history.last(events.Thawed)
    patience = thaw.window if thaw is not None else setting(start, "plasticity", "window")
    return (
        f"“{longest.name}” was never stationary for long enough. Its longest row was "
        f"{longest.stationary} of the "
        f"{patience if isinstance(patience, int) else 'consecutive'} evaluations that it takes "
        f"(readings: {len(readings)})."
    )
