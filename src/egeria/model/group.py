"""Divides a model into pieces, and groups its repeated blocks by size (paper §6.3).

- *weight matrices*: parameters of two or more dimensions, except embedding tables, tokens and
  positions [1, n, d], which are looked up and not multiplied with.
- *unit*: a submodule with at most one weight matrix, such as a convolution or a normalisation.
- *block*: an outermost instance of a class that repeats, with two weight matrices or more.
- *stage*: an instance of a repeated class that is little more than a chain of blocks.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from egeria.errors import UnsupportedModelError

# A layer module consists of blocks, or of units if blocks hold less than half of the matrices, and
# of what is loose around them. Direct are the own parameters of a submodule that is divided.
Role = Literal["block", "unit", "loose", "direct"]
ATOMS = ("block", "unit")
_FindRole = Callable[[str, nn.Module], Role | None]  # by name and submodule
_PURE_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, ParametrizationList)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Piece:
    """A part of the model that is not divided; pieces do not overlap."""

    name: str
    role: Role
    module: nn.Module
    parameters: tuple[str, ...]


def parent_of(name: str) -> str:
    """Return the dotted name one level up; the model itself is the empty name."""
    return name.rpartition(".")[0]


def is_under(name: str, ancestor: str) -> bool:
    """Return whether `name` lies inside `ancestor`; everything lies inside the empty name."""
    return not ancestor or name.startswith(ancestor + ".")


def can_be_called(module: nn.Module) -> bool:
    """Return whether the module has a forward pass; lists and dicts of modules have none."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def tables_in(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are looked up by index."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    tables = (part for part in module.modules() if isinstance(part, kinds))
    return {parameter for table in tables for parameter in table.parameters()}


def find_pieces(model: nn.Module, pattern: str | None = None) -> tuple[Piece, ...]:
    """Divide a model without wrappers into pieces, in the order of definition.

    Blocks are the outermost submodules whose full names match `pattern`; without one, those found.

    Raises:
        UnsupportedModelError: parameters, their shapes or matches are missing.
    """
    parameters = list(model.parameters())
    if not parameters:
        raise UnsupportedModelError(
            "A model must have parameters, found none. Pass the model that the optimizer trains."
        )
    if any(map(is_lazy, parameters)):
        raise UnsupportedModelError(
            "All parameters must have a shape, found lazy ones. Run one forward pass before attach."
        )
    find_role = _Census(model).role if pattern is None else _roles_by_name(model, pattern)
    return tuple(_walk(model, find_role))


def _roles_by_name(model: nn.Module, pattern: str) -> _FindRole:
    """Return a function that makes blocks of the outermost submodules that match a pattern."""
    matches: list[str] = []
    for name, module in model.named_modules():
        has_output = can_be_called(module) and next(module.parameters(), None) is not None
        inside = bool(matches) and is_under(name, matches[-1])
        if name and has_output and not inside and re.fullmatch(pattern, name):
            matches.append(name)
    if len(matches) < 2:
        raise UnsupportedModelError(
            f"modules.pattern must match the full names of two submodules with parameters, "
            f"{pattern!r} matches {matches}. Compare it with the names in `model.named_modules()`."
        )

    def find_role(path: str, _module: nn.Module) -> Role | None:
        if path in matches:
            return "block"
        return None if any(is_under(match, path) for match in matches) else "loose"

    return find_role


def _walk(model: nn.Module, find_role: _FindRole) -> Iterator[Piece]:
    """Yield the submodules with a role; those without one are divided."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    met: set[nn.Module] = set()

    def visit(path: str, module: nn.Module) -> Iterator[Piece]:
        parts = [part for part in module.modules() if type(part) not in _PURE_CONTAINERS]
        if met.issuperset(parts or [module]):
            return  # another name of a known module
        role = find_role(path, module) if path and can_be_called(module) else None
        own = tuple(names[p] for p in module.parameters(recurse=role is not None))
        if own or role is not None:
            yield Piece(name=path, role=role or "direct", module=module, parameters=own)
        met.update([module] if role is None else module.modules())
        for name, child in module.named_children() if role is None else ():
            yield from visit(f"{path}.{name}" if path else name, child)

    return visit("", model)


class _Census:
    """Counts what repeats in a model, and gives each submodule its role."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        tokens = {p for p in model.parameters() if p.ndim == 3 and p.shape[0] == 1}
        matrices = {p for p in model.parameters() if p.ndim >= 2} - tables_in(model) - tokens
        self._weights = {module: matrices.intersection(module.parameters()) for module in modules}
        kinds = Counter(type(part) for part in modules if len(self._weights[part]) >= 2)
        self._repeated = {kind for kind in kinds if kinds[kind] >= 2}.difference(_PURE_CONTAINERS)
        self._blocks = self._outermost_blocks(model, frozenset())
        held = set().union(*(self._weights[block] for block in self._blocks))
        self._blocks_dominate = bool(self._blocks) and 2 * len(held) >= len(self._weights[model])

    def role(self, _path: str, module: nn.Module) -> Role | None:
        """Return the role of a submodule; None if it is to be divided."""
        if module in self._blocks:
            return "block"
        has_many = len(self._weights[module]) >= 2
        is_own = type(module) not in _PURE_CONTAINERS and self._blocks.isdisjoint(module.modules())
        if self._blocks_dominate:
            return "loose" if is_own or not has_many else None
        is_leaf = next(module.children(), None) is None
        is_of_torch = type(module).__module__.startswith("torch.nn.") and is_own
        if has_many and not (is_leaf or is_of_torch or is_parametrized(module)):
            return None
        return "unit" if any(p.ndim >= 2 for p in module.parameters()) else "loose"

    def _outermost_blocks(self, model: nn.Module, excluded: frozenset[type]) -> set[nn.Module]:
        """Find the blocks; a class that occurs only once outside the others is none."""
        blocks: set[nn.Module] = set()
        waiting = list(model.children())
        while waiting:
            module = waiting.pop()
            is_candidate = self._repeats(module) and type(module) not in excluded
            if is_candidate and can_be_called(module) and not self._is_stage(module):
                blocks.add(module)
            else:
                waiting.extend(module.children())
        single = {kind for kind, count in Counter(map(type, blocks)).items() if count == 1}
        return self._outermost_blocks(model, excluded | single) if single else blocks

    def _repeats(self, module: nn.Module) -> bool:
        return type(module) in self._repeated and len(self._weights[module]) >= 2

    def _is_stage(self, module: nn.Module) -> bool:
        """Return whether a module holds siblings, and beside them less than one sibling.

        Experts in a transformer block are siblings too, but its attention outweighs each.
        """
        siblings = [self._weights[sibling] for sibling in self._siblings(module)]
        rest = self._weights[module].difference(*siblings)
        return bool(siblings) and len(rest) < min(map(len, siblings))

    def _siblings(self, module: nn.Module) -> list[nn.Module]:
        """Collect the outermost same-class repeated children of chains inside the module."""
        children = list(module.children())
        is_chain = not can_be_called(module) or type(module).forward is nn.Sequential.forward
        classes = Counter(type(child) for child in children if is_chain and self._repeats(child))
        found = [child for child in children if classes[type(child)] >= 2 and self._repeats(child)]
        others = [child for child in children if child not in found]
        return found + [inner for child in others for inner in self._siblings(child)]


JUMP = 2.0  # from this factor on between their sizes, neighbours are no stage


class Group(NamedTuple):
    """The atoms from `start` up to, not including, `stop`: one layer module, and why it is one."""

    start: int
    stop: int
    reason: str


def group_atoms(
    names: Sequence[str],
    sizes: Sequence[int],
    total: int,
    target_share: float,
    minimum_share: float,
) -> list[Group]:
    """Group atoms of these names and sizes, front to back, into layer modules.

    Stages under `minimum_share` of the total join a neighbour, and those well over `target_share`
    are split into parts of similar size. The last atom stays alone.
    """
    stages = _join_small(_find_stages(names, sizes), sizes, minimum_share * total)
    *groups, last = (part for stage in stages for part in _split(stage, sizes, total, target_share))
    if last.stop - last.start > 1:
        groups.append(last._replace(stop=last.stop - 1))
        reason = "The last block stays alone, because the last layer module is never frozen"
        last = Group(last.stop - 1, last.stop, reason)
    return [*groups, last]


def name_group(names: Sequence[str], group: Group) -> str:
    """Name a group after its stage where it is the whole of one, else after first and last atom."""
    inside = names[group.start : group.stop]
    if len(inside) == 1:
        return inside[0]
    stage = parent_of(inside[0])
    while not all(is_under(name, stage) for name in inside):
        stage = parent_of(stage)
    is_whole = bool(stage) and sum(is_under(name, stage) for name in names) == len(inside)
    return stage if is_whole else f"{inside[0]}-{inside[-1]}"


def _find_stages(names: Sequence[str], sizes: Sequence[int]) -> list[Group]:
    """Cut where the home of the atoms changes, and where their size jumps for good."""
    homes = [_home(name, names) for name in names]
    reasons = {0: "The model begins here"}
    for i in range(1, len(names)):
        if homes[i] != homes[i - 1]:
            reasons[i] = f"Another stage begins at {names[i]}"
        elif _jumps(sizes, homes, i):
            change = f"from {sizes[i - 1]:,} to {sizes[i]:,} parameters"
            reasons[i] = f"The size jumps at {names[i]}, {change}"
    return [Group(i, stop, reasons[i]) for i, stop in pairwise([*reasons, len(names)])]


def _home(name: str, names: Sequence[str]) -> str:
    """Return the nearest ancestor that holds two atoms or more."""
    home = parent_of(name)
    while home and sum(is_under(other, home) for other in names) < 2:
        home = parent_of(home)
    return home


def _jumps(sizes: Sequence[int], homes: Sequence[str], i: int) -> bool:
    """Return whether the size jumps at atom i, and does not alternate, as with experts."""

    def differ(a: int, b: int) -> bool:
        outside = a < 0 or b >= len(sizes) or homes[a] != homes[b]
        return outside or max(sizes[a], sizes[b]) >= JUMP * min(sizes[a], sizes[b])

    return differ(i - 1, i) and differ(i - 1, i + 1) and differ(i - 2, i)


def _join_small(stages: Sequence[Group], sizes: Sequence[int], minimum_size: float) -> list[Group]:
    """Join stages that are too small with the next one, the last with the one before."""
    note = ", joined with a neighbour too small to stand alone"
    joined = list(stages)
    while len(joined) > 1 and (
        small := [i for i, s in enumerate(joined) if sum(sizes[s.start : s.stop]) < minimum_size]
    ):
        i = min(small[0], len(joined) - 2)
        front, back = joined[i : i + 2]
        joined[i : i + 2] = [Group(front.start, back.stop, front.reason.removesuffix(note) + note)]
    return joined


def _split(stage: Group, sizes: Sequence[int], total: int, target_share: float) -> list[Group]:
    """Split a stage into parts near the target, at least one."""
    own = sizes[stage.start : stage.stop]
    share = sum(own) / total
    count = max(1, min(len(own), math.floor(share / target_share + 0.5)))
    edges = [stage.start, *(stage.start + edge for edge in split_evenly(own, count)), stage.stop]
    remark = f"of {count} of a stage with {share:.0%} of the parameters"
    reasons = [f"{stage.reason}; part 1 {remark}" if count > 1 else stage.reason]
    reasons += [f"Part {number} {remark}" for number in range(2, count + 1)]
    return [Group(*ends, reason) for ends, reason in zip(pairwise(edges), reasons, strict=True)]


def split_evenly(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Return where to split for the least sum of squared sizes, longer parts first if equal."""
    sums = [0, *accumulate(sizes)]

    @cache
    def split(start: int, num_parts: int) -> tuple[int, list[int]]:
        """Return the least cost of parts from here on, and where all but the first begin."""
        if num_parts == 1:
            return (sums[-1] - sums[start]) ** 2, []
        edges, left = range(start + 1, len(sizes) - num_parts + 2), num_parts - 1
        cost, edge = min(((sums[e] - sums[start]) ** 2 + split(e, left)[0], -e) for e in edges)
        return cost, [-edge, *split(-edge, left)[1]]

    return split(0, num_parts)[1]
