"""What a report says in words, the same for the page and for the terminal."""

from __future__ import annotations

from collections import Counter

from egeria import events
from egeria.policy import KNOWLEDGE_GUIDED, POLICIES, first_stage
from egeria.report.summary import Clock, Summary
from egeria.report.wording import count, duration, number, percent, plural

MAX_METRICS = 4
ROUGH_STEPS = 100
"""Unfrozen steps under which their pace says little."""
SHORT_SHARE = 0.75
"""Share of `total_steps` that a run must have had, or the report asks whether they were right."""
EARLY_SHARE = 0.1
"""Share of the run at its beginning in which iterations are slow: memory and kernels are found."""


def progress(summary: Summary) -> str:
    """Return how far the run came."""
    total = summary.total_steps
    return f"{count(summary.step)} {'' if total is None else f'of {count(total)} '}steps"


def frozen_when(summary: Summary) -> str:
    """Return when what is frozen at the end of the journal is, or was."""
    return "at the end" if summary.closed else "now"


def headline(summary: Summary) -> list[tuple[str, str]]:
    """Return the numbers that come first, each under its name."""
    of_modules = f" of {summary.num_modules} modules" if summary.modules else ""
    share, mean = percent(summary.parameter_share), percent(summary.mean_parameter_share)
    return [
        ("progress", f"{progress(summary)}, {summary.stage}"),
        ("time saved, wall", _saved(summary.wall)),
        ("time saved, CPU", _saved(summary.cpu)),
        ("egeria's overhead", f"{percent(summary.overhead_share)} of training time"),
        (
            f"frozen {frozen_when(summary)}",
            f"{summary.frozen}{of_modules} ({share} of parameters)",
        ),
        (
            "mean over the run",
            f"{mean} of parameters frozen, {percent(summary.skipped_share)} of compute skipped",
        ),
        *(
            (metric.name, f"{number(metric.values[-1])} (best {number(metric.best)})")
            for metric in summary.metrics[:MAX_METRICS]
        ),
    ]


def verdict(summary: Summary) -> str:
    """Return in a sentence or two what freezing saved, or why nothing froze."""
    if (reason := why_nothing_froze(summary)) is not None:
        return reason
    wall, cpu = summary.wall, summary.cpu
    if wall.saved_s is None:
        return (
            "The time saved is not known: no interval ran with nothing frozen, so there is no "
            "pace of this run to compare with."
        )
    if wall.saved_s < 0:
        more = percent(-wall.saved_s / wall.unfrozen_s if wall.unfrozen_s else None)
        return (
            f"Freezing did not pay: with its overhead it cost about {duration(-wall.saved_s)} of "
            f"wall time ({more}) more than it saved."
        )
    return (
        f"Freezing saved about {duration(wall.saved_s)} of wall time ({percent(wall.saved_share)}) "
        f"and {duration(cpu.saved_s)} of CPU time ({percent(cpu.saved_share)}), overhead deducted."
    )


def cautions(summary: Summary) -> list[str]:
    """Return what a reader must know before trusting the numbers."""
    found = _doubts(summary)
    if summary.time_saved_s is not None and why_nothing_froze(summary) is None:
        found += _roughness(summary)
    dropped = Counter(event.reason for event in summary.of(events.ReadingDropped))
    if dropped:
        reasons = "; ".join(f"{reason} ({amount})" for reason, amount in dropped.most_common())
        found.append(f"{plural(dropped.total(), 'evaluation')} gave no usable reading: {reasons}.")
    declined = (f"{event.what} ({event.reason})" for event in summary.of(events.Declined))
    found += [f"Declined: {what}." for what in dict.fromkeys(declined)]
    faults = Counter((event.where, event.error) for event in summary.of(events.FaultCaught))
    for (where, error), amount in faults.items():
        found.append(f"Fault in {where}, {plural(amount, 'time')}; training went on: {error}")
    return found


def _doubts(summary: Summary) -> list[str]:
    """Return why the journal may not hold the whole run."""
    step, total_steps = count(summary.step), summary.total_steps or 0
    is_short = summary.closed and summary.step < SHORT_SHARE * total_steps
    told = (
        (
            is_short,
            f"The run ended after {step} of the {count(total_steps)} steps of total_steps. Unless "
            "it was stopped early: total_steps takes steps of the optimizer, fewer than batches "
            "where gradients accumulate, and run.step is called after each.",
        ),
        (
            not summary.closed,
            "The run was not closed (it still runs, or it crashed): the numbers stand as of step "
            f"{step}.",
        ),
        (
            summary.first_step,
            f"The journal begins at step {count(summary.first_step)}, where the run was resumed; "
            "what came before stands in another directory and is not counted.",
        ),
        (summary.num_resumed, f"The run was resumed {plural(summary.num_resumed, 'time')}."),
        (
            summary.num_earlier_runs,
            f"The directory also holds {plural(summary.num_earlier_runs, 'earlier run')}, left "
            "out here.",
        ),
        (
            summary.num_damaged,
            f"{plural(summary.num_damaged, 'line')} of the journal could not be read.",
        ),
    )
    return [sentence for holds, sentence in told if holds]


def _roughness(summary: Summary) -> list[str]:
    """Return why the estimate of the time saved may be off."""
    found, unfrozen = [], summary.paces[0]
    if unfrozen.num_steps < ROUGH_STEPS:
        found.append(
            f"The time saved is a rough estimate: only {plural(unfrozen.num_steps, 'step')} ran "
            "with nothing frozen. A second run without egeria measures it."
        )
    last = max(interval.step for interval in summary.intervals if not interval.frozen)
    if last <= EARLY_SHARE * (summary.total_steps or summary.step):
        found.append(
            "The time saved is probably a little less: all that ran with nothing frozen lies in "
            f"the first {EARLY_SHARE:.0%} of the run, and the first iterations are the slow ones."
        )
    return found


def _saved(clock: Clock) -> str:
    if clock.saved_s is None:
        return "not known: nothing ran unfrozen to compare with"
    return f"{percent(clock.saved_share, signed=True)} ({duration(clock.saved_s)})"


def why_nothing_froze(summary: Summary) -> str | None:
    """Return the first reason that holds, as a sentence; None where the run did freeze."""
    if any(after for _, _, after in summary.changes):
        return None
    if summary.last(events.RunStarted) is None:
        return "The journal does not say how the run began: its first lines are missing or damaged."
    declined = summary.of(events.Declined)
    for event in declined:
        if event.what == "freezing":
            return f"Nothing was frozen: the library declined to. {event.reason}"
    reason = _decided_reason(summary) or _stage_reason(summary) or _reading_reason(summary)
    also = "; ".join(dict.fromkeys(f"{event.what} ({event.reason})" for event in declined))
    return f"Nothing was frozen: {reason}" + (f" The library declined: {also}." if also else "")


def _decided_reason(summary: Summary) -> str | None:
    """Return why the cut, a refusal or the policy let nothing freeze."""
    if summary.started.deepest_freeze <= 0:
        return (
            f"none of its {summary.num_modules} layer modules may freeze."
            if summary.num_modules > 1
            else f"with {summary.num_modules} layer module(s) there is none in front of the last, "
            "which never freezes."
        )
    refused, plan = summary.last(events.DepthRefused), summary.last(events.PlanMade)
    if refused is not None:
        return (
            f"the policy asked for {refused.asked} at step {refused.step}: refused, "
            f"{refused.reason}."
        )
    policy = summary.setting("policy", "name")
    if policy == "none":
        return "the policy 'none' freezes nothing: it is the plain run to compare with."
    if plan is not None and not plan.plan:
        return f"{plan.reason}."
    if policy in POLICIES and first_stage(policy) == KNOWLEDGE_GUIDED:
        return (
            f"the policy {policy!r} had no module to freeze up to step {summary.step}, where the "
            "journal ends."
        )
    return None


def _stage_reason(summary: Summary) -> str | None:
    """Return why a run with readings is still bootstrapping."""
    num_intervals, length = len(summary.of(events.IntervalMeasured)), summary.started.interval_steps
    if not num_intervals:
        return (
            f"no interval was completed. An interval is {length} steps, and the journal ends at "
            f"step {summary.step}."
        )
    if summary.last(events.StageChanged) or summary.last(events.PlasticityRead):
        return None
    return (
        f"the run is still bootstrapping. After {num_intervals} intervals of {length} steps the "
        "mean loss has not yet changed little enough from one interval to the next."
    )


def _reading_reason(summary: Summary) -> str:
    """Return why the readings let nothing freeze."""
    readings, drops = summary.of(events.PlasticityRead), summary.of(events.ReadingDropped)
    if not readings and not drops:
        return "bootstrapping ended, but no evaluation followed before the journal ends."
    if not readings:
        return f"none of {len(drops)} evaluations gave a usable reading."
    longest = max(readings, key=lambda reading: reading.stationary)
    if not longest.stationary:
        return (
            f"“{longest.name}” was never stationary (readings: {len(readings)}): it was still "
            "learning."
        )
    patience = summary.setting("plasticity", "window")
    return (
        f"“{longest.name}” was never stationary for long enough. Its longest row was "
        f"{longest.stationary} of the {patience} evaluations that it takes (readings: "
        f"{len(readings)})."
    )
