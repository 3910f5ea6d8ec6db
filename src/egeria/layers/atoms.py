"""Finding the atoms of a model, the repeated blocks that are never cut apart, and grouping them
(paper §6.3).

The words of this file:

- *weight matrices* of a submodule: its parameters of two or more dimensions. Embedding tables and
  tokens or positions of the shape [1, n, d] are looked up, not multiplied with, and do not count.
- *unit*: a submodule with at most one weight matrix, such as a convolution or a normalisation.
- *block*: an outermost instance of a class that repeats, with two weight matrices or more.
- *stage*: an instance of a repeated class that is little more than a chain of blocks.
- *piece*: what the walk through the model takes whole; together the pieces are the model.
- *atom*: a piece that layer modules are made of, with the loose pieces around it. Blocks are atoms;
  in a model where blocks hold less than half of the weight matrices, units are atoms too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

Role = Literal["block", "unit", "loose", "direct", "alias", "uncalled"]
"""`block` and `unit` are atoms, `loose` is any other submodule, `direct` are parameters that a
submodule taken apart holds itself, `alias` is a submodule met before, in another container maybe,
`uncalled` one that the forward pass skips."""

_PURE_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, ParametrizationList)
TABLES = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of the model that the parser takes whole."""

    name: str
    """Dotted name of the submodule."""
    role: Role
    parameters: tuple[str, ...]
    """Names as in `model.named_parameters()`."""
    size: int
    """Elements of those parameters."""

    @property
    def is_submodule(self) -> bool:
        """Whether the piece is a submodule of its own, which can be hooked and frozen."""
        return self.role not in ("direct", "alias")


@dataclass(frozen=True, kw_only=True, slots=True)
class Atom:
    """A block or unit with the loose pieces that go with it, in execution order."""

    core: Piece
    lead: tuple[Piece, ...]
    trail: tuple[Piece, ...] = ()
    """What normalises a unit's output, and the head behind the last atom."""

    @property
    def name(self) -> str:
        """Dotted name of the block or unit."""
        return self.core.name

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in execution order."""
        return (*self.lead, self.core, *self.trail)

    @property
    def tap(self) -> str:
        """The block itself; of units the last one with parameters."""
        behind = self.trail if self.core.role == "unit" else ()
        return [
            self.name,
            *(piece.name for piece in behind if piece.role == "loose" and piece.parameters),
        ][-1]


def parent_of(name: str) -> str:
    """Return the dotted name one level up; the model itself is the empty name."""
    return name.rpartition(".")[0]


def is_under(name: str, ancestor: str) -> bool:
    """Return whether `name` lies inside `ancestor`; everything lies inside the empty name."""
    return not ancestor or name.startswith(ancestor + ".")


def can_be_called(module: nn.Module) -> bool:
    """Return whether the module has a forward pass; lists and dicts of modules have none."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def names_of_reused(model: nn.Module) -> list[str]:
    """Return the names of the submodules that hold parameters and have more than one name."""
    counts = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    return [
        name for name, module in model.named_modules() if counts[module] > 1 and module._parameters
    ]


def find_pieces(model: nn.Module, matches: Collection[str] | None = None) -> list[Piece]:
    """Take a model apart into pieces, in definition order; `matches` names the atoms, None looks
    for blocks.
    """
    if matches is None:
        return list(_walk(model, _Census(model).role))

    def role_by_name(path: str, _module: nn.Module) -> Role | None:
        if path in matches:
            return "block"
        return None if any(is_under(match, path) for match in matches) else "loose"

    return list(_walk(model, role_by_name))


def _walk(model: nn.Module, rule: Callable[[str, nn.Module], Role | None]) -> Iterator[Piece]:
    """Yield the pieces that a rule gives a role; what it gives None is taken apart."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    children: dict[str, list[tuple[str, nn.Module]]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        if path:
            children[parent_of(path)].append((path, module))
    met: set[nn.Module] = set()

    def piece(name: str, role: Role, parameters: Iterable[nn.Parameter]) -> Piece:
        own = list(parameters)
        size = sum(parameter.numel() for parameter in own)
        return Piece(
            name=name,
            role=role,
            parameters=tuple(names[id(parameter)] for parameter in own),
            size=size,
        )

    def visit(path: str, module: nn.Module) -> Iterator[Piece]:
        is_alias = all(part in met for part in _substance(module))
        role = rule(path, module) if path and can_be_called(module) else None
        met.add(module)
        if is_alias or role is not None:
            met.update(module.modules())
            yield piece(path, "alias" if is_alias or role is None else role, module.parameters())
            return
        own = list(module.parameters(recurse=False))
        if own:
            yield piece(path, "direct", own)
        for child_path, child in children[path]:
            yield from visit(child_path, child)

    return visit("", model)


def _substance(module: nn.Module) -> list[nn.Module]:
    """Return what is in a module but plain containers; of an empty one itself."""
    parts = [part for part in module.modules() if type(part) not in _PURE_CONTAINERS]
    return parts or [module]


class _Census:
    """Counts what repeats in a model, and gives each submodule its role."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        tables = {
            p for module in modules if isinstance(module, TABLES) for p in module.parameters()
        }
        looked_up = {p for p in model.parameters() if p.ndim == 3 and p.shape[0] == 1}
        matrices = {p for p in model.parameters() if p.ndim >= 2} - tables - looked_up
        self._weights = {module: matrices.intersection(module.parameters()) for module in modules}
        kinds = Counter(
            type(m)
            for m in modules
            if type(m) not in _PURE_CONTAINERS and len(self._weights[m]) >= 2
        )
        self._repeated = {kind for kind, count in kinds.items() if count >= 2}
        self._blocks = self._outermost_blocks(model, frozenset())
        held = set().union(*(self._weights[block] for block in self._blocks))
        self._blocks_dominate = bool(self._blocks) and 2 * len(held) >= len(self._weights[model])

    def role(self, _path: str, module: nn.Module) -> Role | None:
        """Return the role of a submodule; None for what is to be taken apart."""
        if module in self._blocks:
            return "block"
        has_many = len(self._weights[module]) >= 2
        holds_no_block = self._blocks.isdisjoint(module.modules())
        is_own = type(module) not in _PURE_CONTAINERS and holds_no_block
        if self._blocks_dominate:
            return "loose" if is_own or not has_many else None
        is_leaf = next(module.children(), None) is None
        is_of_torch = type(module).__module__.startswith("torch.nn.") and is_own
        if has_many and not (is_leaf or is_of_torch or is_parametrized(module)):
            return None
        return "unit" if any(p.ndim >= 2 for p in module.parameters()) else "loose"

    def _outermost_blocks(self, model: nn.Module, excluded: frozenset[type]) -> set[nn.Module]:
        """Find the blocks; a class that occurs once outside all others is no block class."""
        blocks: set[nn.Module] = set()
        waiting = list(model.children())
        while waiting:
            module = waiting.pop()
            is_candidate = (
                self._repeats(module) and type(module) not in excluded and can_be_called(module)
            )
            if is_candidate and not self._is_stage(module):
                blocks.add(module)
            else:
                waiting.extend(module.children())
        single = {kind for kind, count in Counter(map(type, blocks)).items() if count == 1}
        return self._outermost_blocks(model, excluded | single) if single else blocks

    def _repeats(self, module: nn.Module) -> bool:
        return type(module) in self._repeated and len(self._weights[module]) >= 2

    def _is_stage(self, module: nn.Module) -> bool:
        """Return whether a module is a stage: it holds siblings, and beside them less than one
        sibling.

        Experts inside a transformer block are siblings too, but its attention outweighs each.
        """
        siblings = [self._weights[sibling] for sibling in self._siblings(module)]
        return bool(siblings) and len(self._weights[module].difference(*siblings)) < min(
            map(len, siblings)
        )

    def _siblings(self, module: nn.Module) -> list[nn.Module]:
        """Collect the outermost same-class repeated children of chains inside the module."""
        children = list(module.children())
        is_chain = not can_be_called(module) or type(module).forward is nn.Sequential.forward
        classes = Counter(type(child) for child in children if is_chain and self._repeats(child))
        found = [child for child in children if classes[type(child)] >= 2 and self._repeats(child)]
        return found + [
            inner for child in children if child not in found for inner in self._siblings(child)
        ]


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
    names: Sequence[str],
    sizes: Sequence[int],
    total: int,
    *,
    target_share: float,
    minimum_share: float,
) -> tuple[Group, ...]:
    """Group atoms of these names and sizes, front to back, into layer modules.

    Stages are found first; those under `minimum_share` join a neighbour, and those well over
    `target_share` are split into parts of similar size. The last atom stays alone in the end, since
    the last layer module is never frozen. Shares are those of `total`.
    """
    groups: list[Group] = []
    for stage in _join_small(_find_stages(names, sizes), sizes, minimum_share * total):
        share = sum(sizes[stage.start : stage.stop]) / total
        groups += _split(
            stage, sizes, share, num_parts=min(len(stage), math.floor(share / target_share + 0.5))
        )
    last = groups[-1]
    if len(last) > 1:
        reason = "The last block stays alone, because the last layer module is never frozen"
        groups[-1:] = [
            replace(last, stop=last.stop - 1),
            Group(start=last.stop - 1, stop=last.stop, reason=reason),
        ]
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
    edges = [
        stage.start + edge for edge in split_evenly(sizes[stage.start : stage.stop], num_parts)
    ]
    parts = []
    for number, (start, stop) in enumerate(pairwise([stage.start, *edges, stage.stop]), start=1):
        remark = f"part {number} of {num_parts} of a stage with {share:.0%} of the parameters"
        reason = f"{stage.reason}; {remark}" if number == 1 else remark.capitalize()
        parts.append(Group(start=start, stop=stop, reason=reason))
    return parts


def split_evenly(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Split a sequence into contiguous parts with the least sum of squared sizes.

    Returns where the second and later parts begin; of equally good splits the one with longer parts
    in front.
    """
    count = len(sizes)
    sums = [0, *accumulate(sizes)]
    costs = [
        (sums[count] - sums[start]) ** 2 for start in range(count)
    ]  # of what follows `start`, in one part
    choices: list[list[int]] = []  # for one part more each time: where the second part begins
    for parts in range(2, num_parts + 1):
        best = [
            min(
                ((sums[edge] - sums[start]) ** 2 + costs[edge], -edge)
                for edge in range(start + 1, count - parts + 2)
            )
            for start in range(count - parts + 1)
        ]
        costs = [cost for cost, _ in best]
        choices.append([-edge for _, edge in best])
    edges: list[int] = []
    for choice in reversed(choices):
        edges.append(choice[edges[-1] if edges else 0])
    return edges
