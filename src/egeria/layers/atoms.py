"""Finding the atoms of a model: the repeated blocks that are never cut apart.

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

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

Role = Literal["block", "unit", "loose", "direct", "alias", "uncalled"]
"""`block` and `unit` are atoms, `loose` is any other submodule, `direct` are parameters that a submodule
taken apart holds itself, `alias` is a submodule met before, `uncalled` one that the forward pass skips."""

_PURE_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, ParametrizationList)
_TABLES = (nn.Embedding, nn.EmbeddingBag)


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
    def is_atom(self) -> bool:
        """Whether layer modules are made of pieces like this."""
        return self.role in ("block", "unit")

    @property
    def is_submodule(self) -> bool:
        """Whether the piece is a submodule of its own, which can be hooked and frozen."""
        return self.role not in ("direct", "alias")

    @property
    def owner(self) -> str:
        """Dotted name of the submodule in whose forward pass this piece is used."""
        return self.name if self.role == "direct" else parent_of(self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Atom:
    """A block or unit with the loose pieces that go with it."""

    core: Piece
    lead: tuple[Piece, ...] = ()
    """Loose pieces in front, in execution order."""
    trail: tuple[Piece, ...] = ()
    """Loose pieces behind: what normalises a unit's output, and the head behind the last atom."""

    @property
    def name(self) -> str:
        """Dotted name of the block or unit."""
        return self.core.name

    @property
    def size(self) -> int:
        """Elements of the parameters of the block or unit alone."""
        return self.core.size

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in execution order."""
        return (*self.lead, self.core, *self.trail)

    @property
    def tap(self) -> str:
        """The block itself; of units the last one with parameters."""
        normalisers = [piece.name for piece in self.trail if piece.role == "loose" and piece.parameters]
        return normalisers[-1] if self.core.role == "unit" and normalisers else self.core.name

    def followed_by(self, pieces: Iterable[Piece]) -> Atom:
        """Return the atom with more pieces behind it."""
        return replace(self, trail=(*self.trail, *pieces))


def parent_of(name: str) -> str:
    """Return the dotted name one level up; the model itself is the empty name."""
    return name.rpartition(".")[0]


def is_under(name: str, ancestor: str) -> bool:
    """Return whether `name` lies inside `ancestor`; everything lies inside the empty name."""
    return not ancestor or name.startswith(ancestor + ".")


def can_be_called(module: nn.Module) -> bool:
    """Return whether the module has a forward pass; lists and dicts of modules have none."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def find_pieces(model: nn.Module, matches: Collection[str] | None = None) -> tuple[Piece, ...]:
    """Take the model apart into pieces, in definition order.

    Args:
        model: the model; with at least one parameter.
        matches: names of the submodules that are to be the atoms; None looks for blocks.
    """
    census = _Census(model)
    if matches is not None:
        return tuple(_Walk(model, census, lambda path, _: _role_by_name(path, matches)).pieces())
    rule = census.role_among_blocks if census.blocks_dominate(model) else census.role_among_units
    return tuple(_Walk(model, census, lambda _, module: rule(module)).pieces())


def _role_by_name(path: str, matches: Collection[str]) -> Role | None:
    """Blocks are what the caller named; None takes apart what holds one."""
    if path in matches:
        return "block"
    return None if any(is_under(match, path) for match in matches) else "loose"


class _Census:
    """Counts what repeats in a model, and gives each submodule its role."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        tables = {id(p) for module in modules if isinstance(module, _TABLES) for p in module.parameters()}
        matrices = {
            id(p)
            for p in model.parameters()
            if p.ndim >= 2 and not (p.ndim == 3 and p.shape[0] == 1) and id(p) not in tables
        }
        self._weights = {module: frozenset(id(p) for p in module.parameters()) & matrices for module in modules}
        classes = Counter(
            type(module)
            for module in modules
            if type(module) not in _PURE_CONTAINERS and len(self._weights[module]) >= 2
        )
        self._repeated = {kind for kind, count in classes.items() if count >= 2}
        self._blocks = self._outermost_blocks(model)

    def blocks_dominate(self, model: nn.Module) -> bool:
        """Return whether the blocks hold at least half of the weight matrices."""
        held = frozenset().union(*(self._weights[block] for block in self._blocks))
        return bool(self._blocks) and 2 * len(held) >= len(self._weights[model])

    def role_among_blocks(self, module: nn.Module) -> Role | None:
        """Give the role where blocks dominate; None for what is to be taken apart."""
        if module in self._blocks:
            return "block"
        if len(self._weights[module]) <= 1:
            return "loose"
        whole = type(module) not in _PURE_CONTAINERS and self._blocks.isdisjoint(module.modules())
        return "loose" if whole else None

    def role_among_units(self, module: nn.Module) -> Role | None:
        """Give the role where units are atoms; None for what is to be taken apart."""
        if module in self._blocks:
            return "block"
        if len(self._weights[module]) > 1 and not self._is_indivisible(module):
            return None
        return "unit" if any(p.ndim >= 2 for p in module.parameters()) else "loose"

    def _is_indivisible(self, module: nn.Module) -> bool:
        """Return whether a module is not to be cut apart: torch's own composites, leaves, and parametrized layers."""
        of_torch = type(module).__module__.startswith("torch.nn.") and type(module) not in _PURE_CONTAINERS
        holds_no_block = self._blocks.isdisjoint(module.modules())
        is_leaf = next(module.children(), None) is None
        return is_leaf or (of_torch and holds_no_block) or is_parametrized(module)

    def _outermost_blocks(self, model: nn.Module, excluded: frozenset[type] = frozenset()) -> set[nn.Module]:
        """Find the blocks; a class that occurs once outside all others is no block class."""
        candidates: set[nn.Module] = set()
        waiting = list(model.children())
        while waiting:
            module = waiting.pop()
            is_candidate = self._repeats(module) and type(module) not in excluded and can_be_called(module)
            if is_candidate and not self._is_stage(module):
                candidates.add(module)
            else:
                waiting.extend(module.children())
        single = {kind for kind, count in Counter(map(type, candidates)).items() if count == 1}
        return self._outermost_blocks(model, excluded | single) if single else candidates

    def _repeats(self, module: nn.Module) -> bool:
        return type(module) in self._repeated and len(self._weights[module]) >= 2

    def _is_stage(self, module: nn.Module) -> bool:
        """Return whether a module is a stage: it holds siblings, and beside them less than one sibling.

        Experts inside a transformer block are siblings too, but its attention outweighs each.
        """
        siblings = self._siblings(module)
        if not siblings:
            return False
        beside = self._weights[module].difference(*(self._weights[sibling] for sibling in siblings))
        return len(beside) < min(len(self._weights[sibling]) for sibling in siblings)

    def _siblings(self, module: nn.Module) -> list[nn.Module]:
        """Collect the outermost same-class repeated children of chains inside the module."""
        children = list(module.children())
        is_chain = not can_be_called(module) or type(module).forward is nn.Sequential.forward
        classes = Counter(type(child) for child in children if is_chain and self._repeats(child))
        found = [child for child in children if classes[type(child)] >= 2 and self._repeats(child)]
        for child in children:
            if child not in found:
                found.extend(self._siblings(child))
        return found


class _Walk:
    """Walks the model in definition order and takes whole what a rule gives a role."""

    def __init__(self, model: nn.Module, census: _Census, rule: Callable[[str, nn.Module], Role | None]) -> None:
        self._model = model
        self._rule = rule
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._children: dict[str, list[tuple[str, nn.Module]]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            if path:
                self._children.setdefault(parent_of(path), []).append((path, module))
        self._met: set[nn.Module] = set()

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the whole model."""
        return self._take_apart("", self._model)

    def _visit(self, path: str, module: nn.Module) -> Iterator[Piece]:
        if module in self._met:
            yield self._piece(path, "alias", module.parameters())
            return
        role = self._rule(path, module) if can_be_called(module) else None
        if role is None:
            yield from self._take_apart(path, module)
        else:
            self._met.update(module.modules())
            yield self._piece(path, role, module.parameters())

    def _take_apart(self, path: str, module: nn.Module) -> Iterator[Piece]:
        self._met.add(module)
        own = list(module.parameters(recurse=False))
        if own:
            yield self._piece(path, "direct", own)
        for child_path, child in self._children.get(path, ()):
            yield from self._visit(child_path, child)

    def _piece(self, name: str, role: Role, parameters: Iterable[nn.Parameter]) -> Piece:
        owned = list(parameters)
        return Piece(
            name=name,
            role=role,
            parameters=tuple(self._names[id(parameter)] for parameter in owned),
            size=sum(parameter.numel() for parameter in owned),
        )
