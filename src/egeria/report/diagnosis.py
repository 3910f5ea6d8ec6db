"""Why nothing was frozen: the first reason that holds, from the journal alone."""

from __future__ import annotations

from collections import Counter
from operator import itemgetter

from egeria import events
from egeria.policy import KNOWLEDGE_GUIDED, POLICIES, first_stage
from egeria.report.history import History, setting
from egeria.report.price import stood_out


def why_nothing_froze(history: History) -> str | None:
    """Return a sentence on why the run froze nothing; None where it did freeze, or update modules
    more rarely.
    """
    if history.of(events.ModuleFrozen) or any(
        event.frozen or event.periods for event in history.of(events.Resumed)
    ):
        return None
    if any(
        event.is_in_force and max(event.periods) > 1 for event in history.of(events.PeriodsChanged)
    ):
        return None
    if (began := history.last(events.LandingBegan)) and history.last(events.LandingEnded) is None:
        return (
            f"Nothing was frozen: “{began.name}” was decided to freeze, and was still landing at "
            "step "
            f"{history.last_step}, where the journal ends."
        )
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
    policy = setting(start, "policy", "name")
    if policy == "none":
        return "the policy 'none' freezes nothing: it is the plain run to compare with."
    cut = history.last(events.ModulesOrdered) or start
    if cut.deepest_freeze <= 0 and len(cut.modules) > 1:  # what was declined follows, and says why
        return f"none of its {len(cut.modules)} layer modules may freeze."
    if cut.deepest_freeze <= 0:
        return (
            f"with {len(cut.modules)} layer module(s) there is none in front of the last, "
            "which never freezes."
        )
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
    policy = setting(start, "policy", "name")
    if policy in ("forecast", "worth") and (ours := _own_reason(history, start)):
        return ours
    if policy == "weight_change":
        return "the weights of the front module never changed by a steady amount for long enough."
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


def _own_reason(history: History, start: events.RunStarted) -> str | None:
    """Return why our own policies froze nothing; None where nothing was measured."""
    if readings := history.of(events.PlasticityRead):
        return _forecast_reason(readings, start)
    intervals = history.of(events.IntervalMeasured)
    measured = [place for place, interval in enumerate(intervals) if interval.worth]
    if measured:
        if all(interval.way_ahead is None for interval in intervals[measured[-1] :]):
            return (
                "the learning rate still to come was never known once the worth of steps was "
                "measured. It takes "
                "`total_steps`, and a `scheduler` that was called at least once since and can be "
                "played forward."
            )
        if measured[-1] == len(intervals) - 1:
            return (
                f"what steps bring was still being measured at step {history.last_step}, where "
                "the journal ends."
            )
        if not stood_out(intervals, start.total_steps):
            return (
                "what the steps of its layer modules bring did not stand out from the noise of "
                "batches, so that "
                "nothing tells what a freeze would cost. Larger batches show more; the policy "
                "'forecast' decides "
                "by how far modules move instead."
            )
        limit = setting(start, "policy", "worth_limit")
        return (
            "no layer module was worth little enough for its time (what all freezes together may "
            f"cost: {limit} of "
            "what steps bring, at a training loss of 1): all of the model was learning, or what "
            "its front brings "
            f"is not known well enough."
        )
    return None


def _forecast_reason(readings: list[events.PlasticityRead], start: events.RunStarted) -> str:
    foreseen = [
        (ahead, reading) for reading in readings if (ahead := reading.change_ahead) is not None
    ]
    if not foreseen:
        return (
            "what the modules would still change was never known. It takes some readings since "
            "the last decay of "
            "the learning rate, and a `scheduler` that says what the rate will be."
        )
    least, reading = min(foreseen, key=itemgetter(0))
    said = (
        f"“{reading.name}” would have changed by {least:.2g} at least to the end "
        f"(limit: {setting(start, 'policy', 'limit')}, readings: {len(readings)})"
    )
    losses = [reading.loss_ahead for _, reading in foreseen if reading.loss_ahead is not None]
    if not losses:
        return f"{said}."
    limit = setting(start, "policy", "loss_limit")
    return f"{said}, and kept {min(losses):.2g} of the fall of the loss at least (limit: {limit})."
