"""What a run froze when, and the compute that was really skipped by it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.proving.journal import Event, Journal

FREEZES = ("frozen", "resumed", "thawed", "declined")
"""Kinds of event that may change how deep a run is frozen."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a run at one depth."""

    begin: float
    end: float
    """In epochs."""
    frozen: int


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Shares of the floating-point work of the whole run: forward, backward, and the gradients of what trains."""

    backward: float | None
    """Backward passes of frozen layer modules, and steps that were not made; None where something froze and nobody
    profiled the model, and in runs of an earlier egeria that updated layer modules at some steps only."""
    forward: float | None
    """Forward passes that were not made because the activations came from the cache, by samples served."""

    @property
    def total(self) -> float | None:
        """Both."""
        return None if self.backward is None or self.forward is None else self.backward + self.forward


UNKNOWN = Skipped(backward=None, forward=None)


def spans(journal: Journal, steps_per_epoch: int) -> tuple[Span, ...]:
    """Return how deep a run was frozen, from its first step to its last."""
    return tuple(
        Span(begin=begin / steps_per_epoch, end=end / steps_per_epoch, frozen=depth)
        for begin, end, depth in _stretches(journal)
    )


def measure_skipped(journal: Journal) -> Skipped:
    """Return what freezing skipped, and what the cache did."""
    shares = _backward_shares(journal)
    trainable = journal.cut["trainable"]
    skipped: float | None = 0.0
    for begin, end, depth in _stretches(journal):
        if depth and shares is None:
            skipped = None
        elif depth and shares is not None and skipped is not None:
            # What has nothing to train has no backward pass that freezing could take away.
            own = math.fsum(share for share, trains in zip(shares[:depth], trainable, strict=False) if trains)
            skipped += own * (end - begin) / journal.last_step
    return Skipped(backward=None if journal.of("periods") else skipped, forward=_served_share(journal, shares))


def _stretches(journal: Journal) -> Iterator[tuple[int, int, int]]:
    """Yield first step, last step and depth of each stretch."""
    points = _depths(journal)
    for (begin, depth), (end, _) in pairwise([*points, (journal.last_step, 0)]):
        yield begin, max(begin, end), depth


def _depths(journal: Journal) -> list[tuple[int, int]]:
    """Return the steps from which on so many front layer modules are frozen; neighbours differ."""
    at = {0: 0}
    for event in journal.of(*FREEZES):
        if event["event"] in ("frozen", "resumed"):
            at[event["step"]] = event["frozen"]
        elif event["event"] == "thawed" or event["what"] == "freezing":  # who cannot go on thaws everything
            at[event["step"]] = 0
    found: list[tuple[int, int]] = []
    for step, depth in at.items():
        if not found or found[-1][1] != depth:
            found.append((step, depth))
    return found


def _backward_shares(journal: Journal) -> list[float] | None:
    """Return the share of an iteration that goes with the backward pass of each layer module; None where not known.

    Backward there is one part for each of the forward pass for the inputs, and another for the weights, as far as they
    train: of a layer with LoRA hardly any do.
    """
    modules, forward = journal.cut["modules"], _forward_shares(journal)
    if len(forward) != len(modules) or not all(map(math.isfinite, forward)):
        return None
    backward = [share * (1.0 + _trained_share(module)) for share, module in zip(forward, modules, strict=True)]
    total = math.fsum(forward) + math.fsum(backward)
    return [part / total for part in backward] if total else backward


def _forward_shares(journal: Journal) -> list[float]:
    """Return the share of the forward pass of each layer module; earlier versions had an event of its own for it."""
    profile = journal.last("compute_profiled")
    shares = (
        profile["forward_shares"] if profile else [entry.get("share", math.nan) for entry in journal.cut["modules"]]
    )
    return [float(share) for share in shares]


def _trained_share(module: Event) -> float:
    count = module.get("num_parameters")
    return module.get("num_trainable", count) / count if count else 1.0


def _served_share(journal: Journal, backward: Sequence[float] | None) -> float | None:
    """Return the share of the work that stored activations spared.

    Each generation counts from the step that decided it to that of the next decision, with the forward share of the
    modules then frozen, and for the share of its samples that came from the cache.
    """
    used = {event["generation"]: event for event in journal.of("cache_used")}
    decided = journal.of("cache")
    hits = [_hit_share(used.get(event["generation"])) if event["mode"] == "stored" else 0.0 for event in decided]
    if not any(hits):
        return 0.0
    forward, last_step, depths = _forward_shares(journal), journal.last_step, _depths(journal)
    if backward is None or not last_step:
        return None
    served = 0.0
    for place, event in enumerate(decided):
        begin = event["step"]
        depth = next(frozen for step, frozen in reversed(depths) if step <= begin)
        end = min([other["step"] for other in decided[place + 1 : place + 2]] + [last_step])
        end = min([end, *(step for step, frozen in depths if step > begin and frozen != depth)])
        served += hits[place] * sum(forward[:depth]) * max(0, end - begin)
    return (1 - math.fsum(backward)) * served / last_step


def _hit_share(used: Event | None) -> float:
    total = used["hits"] + used["misses"] if used else 0
    return used["hits"] / total if used and total else 0.0
