"""What was frozen when, and how much of the model and of its compute that is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from egeria.events import ComputeProfiled, Declined, ModuleFrozen, ModulesOrdered, Resumed, RunStarted, Thawed
from egeria.report.history import History

BACKWARD_SHARE = 2 / 3
"""An iteration is one part forward and two parts backward (inputs and weights)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One layer module of the run, by its place from the front."""

    name: str
    trainable: bool
    num_parameters: int | None
    parameter_share: float | None
    forward_share: float | None
    """Share of the forward pass' floating-point operations; None where nobody profiled them."""
    steps_frozen: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezeMark:
    """One module froze or thawed."""

    step: int
    module: int
    name: str
    action: str
    """'frozen' or 'thawed'."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthPoint:
    """From this step on, `frozen` front modules are frozen."""

    step: int
    frozen: int
    parameter_share: float | None
    """Share of all parameters that is frozen."""
    skipped_share: float | None
    """Share of an iteration's compute that is skipped: the backward pass of the frozen modules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """The number of frozen front modules changed."""

    step: int
    before: int
    after: int
    reason: str
    names: dict[int, str]
    """Those that the event itself gave."""


def depth_points(history: History) -> tuple[DepthPoint, ...]:
    """Return how deep the run was frozen, one point per change, from its first step."""
    depths = {history.first_step: 0} | {change.step: change.after for change in _changes(history)}
    shares = _parameter_shares(history)
    points: list[DepthPoint] = []
    for step, depth in sorted(depths.items()):
        if not points or points[-1].frozen != depth:
            skipped_share = _skipped_share(history, depth)
            point = DepthPoint(step=step, frozen=depth, parameter_share=shares.get(depth), skipped_share=skipped_share)
            points.append(point)
    return tuple(points)


def freeze_marks(history: History) -> tuple[FreezeMark, ...]:
    """Return the freezes and thaws in order, one mark per module, front to back."""
    names = {place: _name(entry, place) for place, entry in enumerate(_cut(history)[0])}
    return tuple(
        FreezeMark(
            step=change.step,
            module=module,
            name=change.names.get(module) or names.get(module) or f"module {module}",
            action="frozen" if change.after > change.before else "thawed",
            reason=change.reason,
        )
        for change in _changes(history)
        for module in range(min(change.before, change.after), max(change.before, change.after))
    )


def _changes(history: History) -> list[_Change]:
    changes: list[_Change] = []
    depth = 0
    for event in history.events:
        if isinstance(event, ModuleFrozen):
            after, reason = event.frozen, event.reason
        elif isinstance(event, Resumed):
            after, reason = event.frozen, "resumed from a saved state"
        elif isinstance(event, Thawed) or (isinstance(event, Declined) and event.what == "freezing"):
            after, reason = 0, event.reason  # a session that cannot continue thaws everything
        else:
            continue
        if after != depth:
            names = {event.module: event.name} if isinstance(event, ModuleFrozen) else {}
            changes.append(_Change(step=event.step, before=depth, after=after, reason=reason, names=names))
            depth = after
    return changes


def list_modules(history: History, points: tuple[DepthPoint, ...], steps_done: int) -> tuple[Module, ...]:
    """Return the layer modules, front to back, with the steps that each was frozen for."""
    entries, trainable = _cut(history)
    counts = [_num_parameters(entry) for entry in entries]
    total = sum(count or 0 for count in counts)
    forward_shares = _forward_shares(history)
    return tuple(
        Module(
            name=_name(entry, place),
            trainable=trainable[place] if place < len(trainable) else True,
            num_parameters=count,
            parameter_share=count / total if count is not None and total else None,
            forward_share=forward_shares[place] if forward_shares else None,
            steps_frozen=sum(steps for point, steps in _lasting(points, steps_done) if point.frozen > place),
        )
        for place, (entry, count) in enumerate(zip(entries, counts, strict=True))
    )


def _lasting(points: tuple[DepthPoint, ...], steps_done: int) -> list[tuple[DepthPoint, int]]:
    """Return each depth with the steps that it lasted."""
    ends = [*(point.step for point in points[1:]), steps_done]
    return [(point, max(end - point.step, 0)) for point, end in zip(points, ends, strict=True)]


def mean_over_steps(
    points: tuple[DepthPoint, ...], steps_done: int, read: Callable[[DepthPoint], float | None]
) -> float | None:
    """Return the mean of a share over all steps that the journal covers; None where it is not known."""
    num_steps = steps_done - points[0].step
    shares = [(read(point), steps) for point, steps in _lasting(points, steps_done)]
    if num_steps <= 0 or any(share is None for share, _ in shares):
        return None
    return sum(share * steps for share, steps in shares if share is not None) / num_steps


def _cut(history: History) -> tuple[list[dict[str, Any]], list[bool]]:
    """Return the modules that the run went by: those of the first forward pass, where it set them."""
    source = history.last(ModulesOrdered) or history.last(RunStarted)
    return (source.modules, source.trainable) if source is not None else ([], [])


def _parameter_shares(history: History) -> dict[int, float]:
    entries, _ = _cut(history)
    counts = [_num_parameters(entry) or 0 for entry in entries]
    total = sum(counts)
    shares = {depth: sum(counts[:depth]) / total for depth in range(1, len(counts) + 1)} if total else {}
    # The session knows better than a sum: weights shared with an active module may stay in training.
    measured = {event.frozen: event.parameter_share for event in history.of(ModuleFrozen)}
    return {0: 0.0, **shares, **{depth: share for depth, share in measured.items() if math.isfinite(share)}}


def _skipped_share(history: History, depth: int) -> float | None:
    forward_shares = _forward_shares(history)
    if forward_shares is None:
        return 0.0 if depth == 0 else None
    _, trainable = _cut(history)
    # A module with nothing to train has no backward pass that freezing could take away.
    spared = (share for place, share in enumerate(forward_shares[:depth]) if trainable[place : place + 1] != [False])
    return BACKWARD_SHARE * sum(spared)


def _forward_shares(history: History) -> list[float] | None:
    profile = history.last(ComputeProfiled)
    entries, _ = _cut(history)
    if (
        profile is None
        or len(profile.forward_shares) != len(entries)
        or not all(map(math.isfinite, profile.forward_shares))
    ):
        return None
    return profile.forward_shares


def _name(entry: dict[str, Any], place: int) -> str:
    return str(entry.get("name", f"module {place}"))


def _num_parameters(entry: dict[str, Any]) -> int | None:
    count = entry.get("num_parameters")
    return count if isinstance(count, int) else None
