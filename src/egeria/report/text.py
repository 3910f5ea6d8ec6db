"""What a report says in words, the same for the page and for the terminal."""

import math
from collections import Counter

from egeria import events
from egeria.policy import BOOTSTRAPPING
from egeria.report.summary import FEW_STEPS, UNKNOWN_START, Clock, Summary, ratio

MAX_METRICS = 4
SHORT_SHARE = 0.75  # of `total_steps`; of a shorter run the report asks whether they were right
EARLY_SHARE = 0.1  # of the run, in which iterations are slow: memory and kernels are found
UNKNOWN = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
_SPACE = "\N{NO-BREAK SPACE}"
# Limit in seconds, factor and name of each unit of time.
_UNITS = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min"))


def percent(share: float | None, *, signed: bool = False) -> str:
    """Write a share as a percentage; a dash where it is not known."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    return f"{100 * share:{'+' if signed else ''}.1f}{_SPACE}%".replace("-", _MINUS)


def duration(seconds: float | None) -> str:
    """Write seconds in the unit that reads best."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    for limit, factor, unit in _UNITS:
        if abs(seconds) < limit:
            return f"{seconds * factor:.3g}{_SPACE}{unit}".replace("-", _MINUS)
    return f"{seconds / 3600:,.1f}{_SPACE}h".replace("-", _MINUS)


def number(value: float | None) -> str:
    """Write a number with four significant digits."""
    return UNKNOWN if value is None else f"{value:.4g}".replace("-", _MINUS)


def mebibytes(num_bytes: float | None) -> str:
    """Write an amount of memory."""
    return UNKNOWN if num_bytes is None else f"{num_bytes / 2**20:,.1f} MiB"


def plural(amount: int, singular: str) -> str:
    """Write an amount of things."""
    return f"{amount:,} {singular}{'' if amount == 1 else 's'}"


def progress(summary: Summary) -> str:
    """Return how far the run came."""
    total = summary.total_steps
    return f"{summary.step:,} {'' if total is None else f'of {total:,} '}steps"


def headline(summary: Summary) -> list[tuple[str, str]]:
    """Return the numbers that come first, each under its name."""
    frozen = f"{summary.frozen}{f' of {len(summary.modules)} modules' if summary.modules else ''}"
    share, now = percent(summary.parameter_share), "at the end" if summary.closed else "now"
    rows = [
        ("progress", progress(summary)),
        ("time saved, wall", _saved(summary.wall)),
        ("time saved, CPU", _saved(summary.cpu)),
        ("egeria's overhead", f"{percent(summary.wall.overhead_share)} of training time"),
        (f"frozen {now}", f"{frozen} ({share} of parameters)"),
        ("compute skipped", percent(summary.skipped_share)),
    ]
    most = {pace.frozen: pace.memory_bytes for pace in summary.paces if pace.memory_bytes}
    if len(most) > 1:
        found = (f"{mebibytes(most[depth])} with {depth or 'nothing'} frozen" for depth in most)
        rows.append(("most memory", ", ".join(found)))
    used = {event.generation: event for event in summary.of(events.CacheUsed)}.values()
    if used:  # the last word on each generation counts
        hits, misses = (sum(getattr(event, name) for event in used) for name in ("hits", "misses"))
        served = percent(ratio(hits, hits + misses))
        rows.append(("cache", f"{hits:,} of {hits + misses:,} samples served ({served})"))
    return rows + [(e.name, number(e.values[-1])) for e in summary.metrics[:MAX_METRICS]]


def _saved(clock: Clock) -> str:
    if clock.saved_s is None:
        return "not known: nothing ran unfrozen to compare with"
    return f"{percent(clock.saved_share, signed=True)} ({duration(clock.saved_s)})"


def verdict(summary: Summary) -> str:
    """Return in a sentence or two what freezing saved, or why nothing froze."""
    wall, cpu = summary.wall, summary.cpu
    if reason := why_nothing_froze(summary):
        return reason
    if wall.saved_s is None:
        return "The time saved is not known: no interval ran with nothing frozen."
    if wall.saved_s < 0:
        more = f"{duration(-wall.saved_s)} of wall time ({percent(-(wall.saved_share or 0.0))})"
        return f"Freezing did not pay: with its overhead it cost about {more} more than it saved."
    saved = f"{duration(wall.saved_s)} of wall time ({percent(wall.saved_share)})"
    saved_cpu = f"{duration(cpu.saved_s)} of CPU time ({percent(cpu.saved_share)})"
    return f"Freezing saved about {saved} and {saved_cpu}, overhead deducted."


def why_nothing_froze(summary: Summary) -> str:
    """Return what the journal says of it, as a sentence; empty where the run did freeze."""
    if any(point.frozen for point in summary.depths):
        return ""
    if summary.started is UNKNOWN_START:
        return "The journal does not say how the run began: its first lines are missing or damaged."
    plan, refused = summary.last(events.PlanMade), summary.last(events.DepthRefused)
    declined = [(event.what, event.reason.rstrip(".")) for event in summary.of(events.Declined)]
    reasons = [f"the library declined {what} ({reason})" for what, reason in declined]
    if refused is not None:
        modules = plural(refused.asked, "layer module")
        reasons.append(f"freezing {modules} was refused at step {refused.step} ({refused.reason})")
    elif plan is not None:
        reasons.append(f"the plan is {plan.plan!r}" if plan.plan else plan.reason)
    elif not reasons:
        name = summary.started.config.get("policy", {}).get("name")
        reasons.append(f"the policy {name!r} froze nothing")
    if readings := summary.of(events.PlasticityRead):
        longest = max(reading.stationary for reading in readings)
        read = plural(len(readings), "reading")
        reasons.append(f"{read}, at most {longest} of them stationary in a row")
    if summary.stage == BOOTSTRAPPING:
        reasons.append("the bootstrapping stage did not end")
    return f"Nothing was frozen up to step {summary.step}: {'; '.join(dict.fromkeys(reasons))}."


def cautions(summary: Summary) -> list[str]:
    """Return what a reader must know before trusting the numbers."""
    found = [sentence for holds, sentence in _doubts(summary) if holds]
    if dropped := Counter(event.reason for event in summary.of(events.ReadingDropped)):
        reasons = "; ".join(f"{reason} ({amount})" for reason, amount in dropped.most_common())
        found.append(f"{plural(dropped.total(), 'evaluation')} gave no usable reading: {reasons}.")
    found += [f"Declined: {e.what} ({e.reason})." for e in summary.of(events.Declined)]
    faults = Counter((event.where, event.error) for event in summary.of(events.FaultCaught))
    for (where, error), amount in faults.items():
        found.append(f"Fault in {where}, {plural(amount, 'time')}; training went on: {error}")
    return list(dict.fromkeys(found))


def _doubts(summary: Summary) -> list[tuple[object, str]]:
    """Return what may be wrong with the numbers, each with whether it is."""
    step, total = summary.step, summary.total_steps or 0
    is_short = summary.closed and step < SHORT_SHARE * total
    is_estimate = summary.time_saved_s is not None and not why_nothing_froze(summary)
    is_rough = is_estimate and summary.num_unfrozen < FEW_STEPS
    last_unfrozen = max((e.step for e in summary.intervals if not e.frozen), default=0)
    is_early = is_estimate and last_unfrozen <= EARLY_SHARE * (total or step)
    ended = f"The run ended after {step:,} of the {total:,} steps of total_steps"
    begins, others = f"{summary.first_step:,}", plural(summary.num_other_runs, "other run")
    damaged, first = plural(summary.num_damaged, "line"), f"line {summary.first_damaged}"
    unfrozen = plural(summary.num_unfrozen, "step")
    return [
        (is_short, f"{ended}, which counts steps of the optimizer and not batches."),
        (not summary.closed, f"The run was not closed: the numbers stand as of step {step:,}."),
        (summary.first_step, f"The journal begins at step {begins}; another has what came before."),
        (summary.num_resumed, f"The run was resumed {plural(summary.num_resumed, 'time')}."),
        (summary.num_other_runs, f"The directory also holds {others}, left out here."),
        (summary.num_damaged, f"{damaged} of the journal could not be read, the first is {first}."),
        (is_rough, f"Only {unfrozen} ran unfrozen: what they take is computed from module sizes."),
        (is_estimate, "Time saved is estimated; on CPUs up to 3 points too low or 5 too high."),
        (is_early, "A little less was saved: only the first steps, the slow ones, ran unfrozen."),
    ]
