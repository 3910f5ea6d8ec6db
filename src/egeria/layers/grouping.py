"""Grouping atoms into layer modules of similar size: plain Python over names and sizes (paper §6.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from egeria.layers.atoms import is_under, parent_of

JUMP = 2.0
"""Factor between the sizes of neighbours from which on they do not belong to one stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The atoms from `start` up to, not including, `stop`; they become one layer module."""

    start: int
    stop: int
    reason: str
    """Why it is cut here, as the beginning of a sentence."""

    def __len__(self) -> int:
        return self.stop - self.start


def group_atoms(
    names: Sequence[str], sizes: Sequence[int], total: int, *, target_share: float, minimum_share: float
) -> tuple[Group, ...]:
    """Group atoms of these names and sizes, front to back, into layer modules.

    Stages are found first; those under `minimum_share` join a neighbour, and those well over
    `target_share` are split into parts of similar size. The last atom stays alone in the end, since
    the last layer module is never frozen. Shares are those of `total`.
    """
    groups: list[Group] = []
    for stage in _join_small(_find_stages(names, sizes), sizes, minimum_share * total):
        share = sum(sizes[stage.start : stage.stop]) / total
        groups += _split(stage, sizes, share, num_parts=min(len(stage), math.floor(share / target_share + 0.5)))
    last = groups[-1]
    if len(last) > 1:
        reason = "The last block stays alone, because the last layer module is never frozen"
        groups[-1:] = [replace(last, stop=last.stop - 1), Group(start=last.stop - 1, stop=last.stop, reason=reason)]
    return tuple(groups)


def _find_stages(names: Sequence[str], sizes: Sequence[int]) -> list[Group]:
    """Cut where the home of the atoms changes, and where their size jumps for good."""
    homes = [_home(name, names) for name in names]
    stages: list[Group] = []
    start, reason = 0, "The model begins here"
    for i in range(1, len(names)):
        if homes[i] != homes[i - 1]:
            cut = f"Another stage begins at {names[i]}"
        elif _jumps(sizes, homes, i):
            cut = f"The size jumps at {names[i]}, from {sizes[i - 1]:,} to {sizes[i]:,} parameters"
        else:
            continue
        stages.append(Group(start=start, stop=i, reason=reason))
        start, reason = i, cut
    return [*stages, Group(start=start, stop=len(names), reason=reason)]


def _home(name: str, names: Sequence[str]) -> str:
    """Return the nearest ancestor that holds two atoms or more."""
    home = parent_of(name)
    while home and sum(is_under(other, home) for other in names) < 2:
        home = parent_of(home)
    return home


def _jumps(sizes: Sequence[int], homes: Sequence[str], i: int) -> bool:
    """Return whether the size changes by a factor of `JUMP` at atom i, and not only for one atom.

    Where sizes alternate (every other block a mixture of experts, say) there is no stage to find.
    """

    def differ(a: int, b: int) -> bool:
        outside = a < 0 or b >= len(sizes) or homes[a] != homes[b]
        return outside or max(sizes[a], sizes[b]) >= JUMP * min(sizes[a], sizes[b])

    return differ(i - 1, i) and differ(i - 1, i + 1) and differ(i - 2, i)


def _join_small(stages: Sequence[Group], sizes: Sequence[int], minimum_size: float) -> list[Group]:
    """Join stages that are too small with the one behind them, or before them at the end."""

    def is_small(stage: Group) -> bool:
        return sum(sizes[stage.start : stage.stop]) < minimum_size

    joined: list[Group] = []
    for stage in stages:
        if joined and is_small(joined[-1]):
            joined.append(_join(joined.pop(), stage))
        else:
            joined.append(stage)
    if len(joined) > 1 and is_small(joined[-1]):
        joined[-2:] = [_join(*joined[-2:])]
    return joined


def _join(front: Group, back: Group) -> Group:
    note = ", joined with a neighbour too small to stand alone"
    return Group(start=front.start, stop=back.stop, reason=front.reason.removesuffix(note) + note)


def _split(stage: Group, sizes: Sequence[int], share: float, *, num_parts: int) -> list[Group]:
    if num_parts <= 1:
        return [stage]
    edges = [stage.start + edge for edge in split_evenly(sizes[stage.start : stage.stop], num_parts)]
    parts = []
    for number, (start, stop) in enumerate(pairwise([stage.start, *edges, stage.stop]), start=1):
        remark = f"part {number} of {num_parts} of a stage with {share:.0%} of the parameters"
        reason = f"{stage.reason}; {remark}" if number == 1 else remark.capitalize()
        parts.append(Group(start=start, stop=stop, reason=reason))
    return parts


def split_evenly(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Split a sequence into contiguous parts with the least sum of squared sizes.

    Returns where the second and later parts begin; of equally good splits the one with longer parts in front.
    """
    count = len(sizes)
    sums = [0, *accumulate(sizes)]
    costs = [(sums[count] - sums[start]) ** 2 for start in range(count)]  # of what follows `start`, in one part
    choices: list[list[int]] = []  # for one part more each time: where the second part begins
    for parts in range(2, num_parts + 1):
        best = [
            min(((sums[edge] - sums[start]) ** 2 + costs[edge], -edge) for edge in range(start + 1, count - parts + 2))
            for start in range(count - parts + 1)
        ]
        costs = [cost for cost, _ in best]
        choices.append([-edge for _, edge in best])
    edges: list[int] = []
    for choice in reversed(choices):
        edges.append(choice[edges[-1] if edges else 0])
    return edges
