"""What was frozen when, and how much of the model and of its compute that is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from egeria.events import (
    ComputeProfiled,
    Declined,
    Event,
    ModuleFrozen,
    ModulesOrdered,
    Resumed,
    RunStarted,
    Thawed,
)
from egeria.report.history import History


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One layer module of the run, by its place from the front."""

    name: str
    trainable: bool
    num_parameters: int
    """Trainable or not."""
    num_trainable: int
    parameter_share: float | None
    """Share of the trainable parameters; None where nothing trains."""
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
    num_steps: int
    """How many steps that lasted."""
    parameter_share: float | None
    """Share of the trainable parameters that is frozen."""
    skipped_share: float | None
    """Share of an iteration's compute that is skipped: the backward pass of what is frozen."""


def depth_points(history: History) -> tuple[DepthPoint, ...]:
    """Return how deep the run was frozen, one point per change, from its first step."""
    depths = {history.first_step: 0} | {
        event.step: after for event, _, after, _ in _changes(history)
    }
    course: list[tuple[int, int]] = []
    for step in sorted(depths):
        if not course or course[-1][1] != depths[step]:
            course.append((step, depths[step]))
    ends = [*(step for step, _ in course[1:]), history.last_step]
    modules = _cut(history)
    shares = _parameter_shares(history, modules)
    return tuple(
        DepthPoint(
            step=step,
            frozen=depth,
            num_steps=max(end - step, 0),
            parameter_share=shares.get(depth),
            skipped_share=_skipped_share(modules, depth),
        )
        for (step, depth), end in zip(course, ends, strict=True)
    )


def mean_over_steps(
    points: tuple[DepthPoint, ...], read: Callable[[DepthPoint], float | None]
) -> float | None:
    """Return the mean of a share over all steps that the journal covers; None where it is not
    known.
    """
    num_steps = sum(point.num_steps for point in points)
    shares = [read(point) for point in points]
    if num_steps == 0 or any(share is None for share in shares):
        return None
    return (
        sum((share or 0.0) * point.num_steps for share, point in zip(shares, points, strict=True))
        / num_steps
    )


def median_over_steps(paces: Iterable[tuple[float, int]]) -> float:
    """Return the median of the paces of intervals, each given with its number of steps and counted
    as often.

    Intervals change their length in a run: the many short ones of a warm-up are few steps. There
    must be one at least.
    """
    ordered = sorted(paces)
    left = sum(num_steps for _, num_steps in ordered) / 2
    for (pace, num_steps), (next_pace, _) in itertools.pairwise(ordered):
        left -= num_steps
        if left <= 0:
            return pace if left else (pace + next_pace) / 2
    return ordered[-1][0]


def freeze_marks(history: History) -> tuple[FreezeMark, ...]:
    """Return the freezes and thaws in order, one mark per module, front to back."""
    names = {place: module.name for place, module in enumerate(_cut(history))}
    marks: list[FreezeMark] = []
    for event, before, after, reason in _changes(history):
        own = {event.module: event.name} if isinstance(event, ModuleFrozen) else {}
        marks += [
            FreezeMark(
                step=event.step,
                module=place,
                name=own.get(place) or names.get(place) or f"module {place}",
                action="frozen" if after > before else "thawed",
                reason=reason,
            )
            for place in range(min(before, after), max(before, after))
        ]
    return tuple(marks)


def list_modules(history: History, points: tuple[DepthPoint, ...]) -> tuple[Module, ...]:
    """Return the layer modules, front to back, with the steps that each was frozen for."""
    return tuple(
        replace(
            module, steps_frozen=sum(point.num_steps for point in points if point.frozen > place)
        )
        for place, module in enumerate(_cut(history))
    )


def _changes(history: History) -> Iterator[tuple[Event, int, int, str]]:
    """Yield the events that changed the number of frozen modules, each with that before and after,
    and why.
    """
    depth = 0
    for event in history.events:
        if isinstance(event, ModuleFrozen):
            after, reason = event.frozen, event.reason
        elif isinstance(event, Resumed):
            after, reason = event.frozen, "resumed from a saved state"
        elif isinstance(event, Thawed) or (
            isinstance(event, Declined) and event.what == "freezing"
        ):
            after, reason = 0, event.reason  # a session that cannot continue thaws everything
        else:
            continue
        if after != depth:
            yield event, depth, after, reason
            depth = after


def _cut(history: History) -> list[Module]:
    """Return the modules that the run went by: those of the first forward pass,
    where it set them.
    """
    source = history.last(ModulesOrdered) or history.last(RunStarted)
    if source is None:
        return []
    total = sum(entry["num_trainable"] for entry in source.modules)
    profile = history.last(ComputeProfiled)
    forward_shares = profile.forward_shares if profile is not None else []
    is_profiled = len(forward_shares) == len(source.modules) and all(
        map(math.isfinite, forward_shares)
    )
    return [
        Module(
            name=entry["name"],
            trainable=source.trainable[place],
            num_parameters=entry["num_parameters"],
            num_trainable=entry["num_trainable"],
            parameter_share=entry["num_trainable"] / total if total else None,
            forward_share=forward_shares[place] if is_profiled else None,
            steps_frozen=0,
        )
        for place, entry in enumerate(source.modules)
    ]


def _parameter_shares(history: History, modules: list[Module]) -> dict[int, float]:
    """Return the share of the parameters that is frozen at each depth."""
    sums = list(itertools.accumulate(module.num_trainable for module in modules))
    shares = {depth: part / sums[-1] for depth, part in enumerate(sums, 1)} if any(sums) else {}
    # The session knows better than a sum: weights shared with an active module may stay in
    # training.
    measured = {event.frozen: event.parameter_share for event in history.of(ModuleFrozen)}
    return (
        {0: 0.0}
        | shares
        | {depth: share for depth, share in measured.items() if math.isfinite(share)}
    )


def backward_shares(forward: Sequence[float], trained: Sequence[float | None]) -> list[float]:
    """Return the share of an iteration's operations that goes with the backward pass of each layer
    module.

    Backward there is one part for each of the forward pass for the inputs, and another for the
    weights, as far as they train: of a layer with LoRA hardly any do.

    Args:
        forward: each one's share of the forward pass.
        trained: share of its parameters that train; None counts as all.
    """
    backward = [
        share * (2.0 if part is None else 1.0 + part)
        for share, part in zip(forward, trained, strict=True)
    ]
    total = math.fsum(forward) + math.fsum(backward)
    return [part / total for part in backward] if total else backward


def backward_shares_of(history: History) -> list[float] | None:
    """Return the same for the layer modules of a run; None where nobody profiled them."""
    return _backward(_cut(history))


def _backward(modules: Sequence[Module]) -> list[float] | None:
    forward = [module.forward_share for module in modules]
    known = [share for share in forward if share is not None]
    if not known or len(known) < len(forward):
        return None
    trained = [
        module.num_trainable / module.num_parameters if module.num_parameters else None
        for module in modules
    ]
    return backward_shares(known, trained)


def _skipped_share(modules: list[Module], depth: int) -> float | None:
    """Return the share of an iteration that goes with the backward pass of what is frozen."""
    if not depth:
        return 0.0
    shares = _backward(modules)
    if shares is None:
        return None
    # A module with nothing to train has no backward pass that freezing could take away.
    return math.fsum(
        share for share, module in zip(shares[:depth], modules, strict=False) if module.trainable
    )
