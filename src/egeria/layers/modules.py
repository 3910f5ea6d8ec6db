"""Layer modules: the record of one, and how a model is cut into them (paper §4.2.1, §6.3).

`atoms` finds the repeated blocks and puts them together by size; here the pieces around the blocks
are given to them, in execution order, and every parameter to exactly one layer module.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from egeria.config.checks import SHARE, check
from egeria.errors import ConfigError, UnsupportedModelError
from egeria.layers.atoms import (
    TABLES,
    Atom,
    Group,
    Piece,
    can_be_called,
    find_pieces,
    group_atoms,
    is_under,
    parent_of,
)
from egeria.layers.order import merge_order


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerModule:
    """Consecutive layers that are judged and frozen as one unit (paper §4.2.1)."""

    name: str
    """Short and unique: "layer1", or "layer3.0-layer3.2" for a part of a stage."""
    submodules: tuple[str, ...]
    """Dotted names of what belongs to it, front to back; none lies inside another."""
    parameters: tuple[str, ...]
    """Names as in `model.named_parameters()`; every parameter of a model is in exactly one
    module."""
    num_parameters: int
    """Elements of those parameters, trainable or not: what models are cut by."""
    tap: str
    """Dotted name of the submodule whose output is the output of this module."""
    shared_parameters: tuple[str, ...] = ()
    """Those of its parameters that modules behind it use too (tied weights)."""
    reason: str
    """Why it is cut here, in one sentence."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in plain JSON types, for the journal."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> LayerModule:
        """Build a layer module from what `to_dict` gave, in this version: with
        exactly its fields.
        """
        expected = {field.name for field in fields(cls)}
        if set(entry) != expected:
            raise ConfigError(
                f"A layer module must have the fields {sorted(expected)}, found {sorted(entry)}. "
                f"Read it with the version of egeria that wrote it."
            )
        values: Any = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in entry.items()
        }
        return cls(**values)


def parameters_of(model: nn.Module, modules: Sequence[LayerModule]) -> list[list[nn.Parameter]]:
    """Return the parameters of each layer module as they are now.

    By one walk through the model: asking for each by its name takes ten times as long, at every
    interval.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    return [
        [named[name] if name in named else model.get_parameter(name) for name in module.parameters]
        for module in modules
    ]


def count_trainable(parameters: Iterable[nn.Parameter]) -> int:
    """Return the elements of those parameters of a layer module that need a gradient: what shares
    are counted of.

    Its `num_parameters` has all of them, adapters and the weights that they leave alone.
    """
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def trains_elsewhere(model: nn.Module, module: LayerModule) -> bool:
    """Return whether all that trains in a layer module is shared with modules behind it: kept,
    nothing would freeze.
    """
    trained = {name for name in module.parameters if model.get_parameter(name).requires_grad}
    return bool(trained) and trained <= set(module.shared_parameters)


def parse_modules(
    model: nn.Module,
    *,
    pattern: str | None = None,
    target_share: float = 0.2,
    minimum_share: float = 0.005,
    tables_apart: bool = False,
    order: Sequence[str] | None = None,
    returned_to: Collection[str] = (),
    uses: Mapping[str, Collection[str]] | None = None,
) -> tuple[LayerModule, ...]:
    """Cut a model into layer modules, front to back.

    Args:
        model: any model with two blocks or layers at least.
        pattern: regular expression; each outermost submodule whose dotted name it matches in full
            becomes a layer module, with no regard to size. Lists and dicts of modules and
            submodules without parameters do not count, since they have no output or nothing to
            freeze.
        target_share: share of all parameters that a layer module aims at. Vocabularies do not
            count: next to those of a multilingual model every stage would look small.
        minimum_share: share of them under which a stage joins its neighbour.
        tables_apart: whether a submodule in front of all blocks that holds a lookup table which no
            layer behind shares is a layer module of its own: it costs little in the passes, and
            much in the optimizer.
        order: names of submodules in execution order, from `CallOrder.order`; what is not in it
            did not run and is no block of its own. None takes the order of definition.
        returned_to: names of submodules that were called again after others, from
            `CallOrder.returned_to`. A submodule with two names that ran in one place only shares
            its parameters with none.
        uses: for each parameter the submodules in which, or on the way to which, it was used, from
            `GraphWalk.uses`.

    Returns:
        At least two layer modules; each parameter of the model belongs to exactly one.

    Raises:
        UnsupportedModelError: when there is nothing to freeze or nothing to cut at.
        ConfigError: when an argument is outside its contract.
    """
    check("target_share", target_share, SHARE)
    check("minimum_share", minimum_share, SHARE)
    matches = None if pattern is None else _outermost_matches(model, pattern)
    uses = uses or {}
    atoms = find_atoms(model, matches, order, tables_apart=tables_apart, uses=uses)
    names = [atom.name for atom in atoms]
    if len(atoms) < 2:
        raise UnsupportedModelError(
            f"A model must have at least two layers or blocks, found {names}. Nothing could ever "
            "freeze, since the "
            "last layer module never does: train this model without egeria, or make its parts "
            "submodules that are "
            f"called."
        )
    single = set() if order is None else _parameters_of_one_place(atoms, returned_to)
    if matches is not None:
        reason = f"The pattern {pattern!r} names it"
        groups = tuple(Group(start=i, stop=i + 1, reason=reason) for i in range(len(atoms)))
        return _build_modules(model, atoms, groups, single, uses)
    sizes, total = [atom.core.size for atom in atoms], _size_without_vocabulary(model, atoms)
    groups = group_atoms(
        names, sizes, total, target_share=target_share, minimum_share=minimum_share
    )
    return _build_modules(model, atoms, groups, single, uses)


def _outermost_matches(model: nn.Module, pattern: str) -> list[str]:
    try:
        matcher = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"pattern must be a valid regular expression, found {pattern!r} ({error}). Correct it."
        ) from error
    matches: list[str] = []
    for name, module in model.named_modules():
        has_output = can_be_called(module) and any(True for _ in module.parameters())
        inside = bool(matches) and is_under(name, matches[-1])
        if name and has_output and not inside and matcher.fullmatch(name):
            matches.append(name)
    if len(matches) < 2:
        raise UnsupportedModelError(
            f"pattern must match the full dotted names of two submodules at least, {pattern!r} "
            "matches "
            f"{matches}. Compare it with the names in `model.named_modules()`; lists and dicts of "
            "modules and "
            f"submodules without parameters do not count."
        )
    return matches


def find_atoms(
    model: nn.Module,
    matches: Sequence[str] | None = None,
    order: Sequence[str] | None = None,
    *,
    tables_apart: bool = False,
    uses: Mapping[str, Collection[str]] | None = None,
) -> tuple[Atom, ...]:
    """Return the blocks that are never cut apart, front to back, with the pieces that go with them.

    Args, and what is raised, as in `parse_modules`; `matches` are the outermost names that its
    pattern matches.
    """
    parameters = list(model.parameters())
    if not parameters:
        raise UnsupportedModelError(
            "A model must have parameters, found none. Pass the model that the optimizer trains."
        )
    if any(is_lazy(parameter) for parameter in parameters):
        raise UnsupportedModelError(
            "All parameters must have a shape, found lazy ones. Run one forward pass before "
            "attaching egeria."
        )
    pieces = find_pieces(model, matches)
    if order is not None:  # submodules that did not run have no output to judge
        silent = {piece.name for piece in pieces if piece.is_submodule} - set(order)
        pieces = [
            replace(p, role="uncalled") if p.is_submodule and p.name in silent else p
            for p in pieces
        ]
    uses = uses or {}
    arranged = _arrange(
        [part for piece in pieces for part in _by_use(model, piece, uses)], order, uses
    )
    return _attach(
        _with_table_apart(model, arranged, uses) if tables_apart and matches is None else arranged
    )


def _by_use(model: nn.Module, piece: Piece, uses: Mapping[str, Collection[str]]) -> Iterator[Piece]:
    """Yield the parameters that a submodule holds itself by the place where they are used first;
    others as they are.
    """
    if piece.role != "direct":
        yield piece
        return
    for _, group in itertools.groupby(
        sorted(piece.parameters, key=lambda name: _first_use(name, uses) or ""),
        key=lambda name: _first_use(name, uses),
    ):
        names = tuple(group)
        yield replace(
            piece, parameters=names, size=sum(model.get_parameter(name).numel() for name in names)
        )


def _first_use(name: str, uses: Mapping[str, Collection[str]]) -> str | None:
    """Return the submodule in which, or on the way to which, a parameter was used first; None where
    that is unknown.
    """
    return next(iter(uses.get(name, ())), None)


def _with_table_apart(
    model: nn.Module, pieces: Sequence[Piece], used: Mapping[str, Collection[str]]
) -> list[Piece]:
    """Make the first loose piece that holds a table of its own a block, if it stands in front of
    all blocks.
    """
    uses = Counter(id(p) for part in model.modules() for p in part.parameters(recurse=False))
    tables = {id(part.weight) for part in model.modules() if isinstance(part, TABLES)}
    front = list(itertools.takewhile(lambda piece: piece.role not in ("block", "unit"), pieces))
    for place, piece in enumerate(front):
        own = [id(model.get_parameter(name)) for name in piece.parameters]
        is_used_again = any(len(used.get(name, ())) > 1 for name in piece.parameters)
        is_table = piece.role == "loose" and bool(tables.intersection(own))
        if is_table and not is_used_again and all(uses[entry] == 1 for entry in own):
            return [*pieces[:place], replace(piece, role="block"), *pieces[place + 1 :]]
    return list(pieces)


def _arrange(
    pieces: Sequence[Piece], order: Sequence[str] | None, uses: Mapping[str, Collection[str]]
) -> list[Piece]:
    """Sort pieces into execution order.

    What is no submodule has no call to go by. Parameters that a submodule holds itself come where
    they are used first; where that is unknown before the first of its pieces that runs. A second
    mention of a submodule comes before the piece it is defined in front of, or behind everything.
    """
    names = [piece.name for piece in pieces if piece.is_submodule]
    ranks = {
        name: rank
        for rank, name in enumerate(names if order is None else merge_order(names, order))
    }

    def ranks_inside(owner: str, candidates: Sequence[Piece]) -> list[int]:
        return [
            ranks[other.name]
            for other in candidates
            if other.is_submodule and is_under(other.name, owner)
        ]

    def key(position: int) -> tuple[int, bool]:
        piece = pieces[position]
        if piece.is_submodule:
            return ranks[piece.name], True
        if piece.role == "alias":
            return next(
                iter(ranks_inside(parent_of(piece.name), pieces[position:])), len(pieces)
            ), False
        used_at = _first_use(piece.parameters[0], uses)
        if used_at is not None and (not used_at or used_at in ranks):
            return ranks.get(used_at, len(pieces)), False
        owner = piece.name
        while owner and not ranks_inside(owner, pieces):
            owner = parent_of(owner)
        return min(ranks_inside(owner, pieces), default=0), False

    return [pieces[position] for position in sorted(range(len(pieces)), key=key)]


def _attach(pieces: Sequence[Piece]) -> tuple[Atom, ...]:
    """Give every loose piece to an atom.

    Stem and what lies in between go to the atom that follows, the head to the last. What normalises
    the output of a unit goes to that unit.
    """
    atoms: list[Atom] = []
    waiting: list[Piece] = []
    for position, piece in enumerate(pieces, start=1):
        waiting.append(piece)
        normalises = (
            bool(atoms)
            and atoms[-1].core.role == "unit"
            and piece.role == "loose"
            and bool(piece.parameters)
        )
        if piece.role in ("block", "unit"):
            atoms.append(Atom(core=piece, lead=tuple(waiting[:-1])))
        elif atoms and (normalises or position == len(pieces)):
            atoms[-1] = replace(atoms[-1], trail=(*atoms[-1].trail, *waiting))
        else:
            continue
        waiting = []
    return tuple(atoms)


def _size_without_vocabulary(model: nn.Module, atoms: Sequence[Atom]) -> int:
    """Count the elements of all parameters but those shaped like an embedding table outside the
    atoms.
    """
    tables = {module.weight.shape for module in model.modules() if isinstance(module, TABLES)}
    in_atoms = {
        name for atom in atoms for name in atom.core.parameters if not _is_table(model, atom.core)
    }
    return sum(
        p.numel()
        for name, p in model.named_parameters()
        if name in in_atoms or p.shape not in tables
    )


def _is_table(model: nn.Module, piece: Piece) -> bool:
    """Return whether a piece holds lookup tables and no other matrix."""
    parts = [
        part
        for name in ([piece.name] if piece.name else [])
        for part in model.get_submodule(name).modules()
    ]
    matrices = [part for part in parts if any(p.ndim >= 2 for p in part.parameters(recurse=False))]
    return bool(matrices) and all(isinstance(part, TABLES) for part in matrices)


def _parameters_of_one_place(atoms: Sequence[Atom], returned_to: Collection[str]) -> set[str]:
    """Return the parameters of submodules that ran, and in one place only: another name of those is
    no other use.
    """
    called = [p for atom in atoms for p in atom.pieces if p.role not in ("alias", "uncalled")]
    names = {parameter for piece in called for parameter in piece.parameters}
    return {name for name in names if not any(is_under(name, other) for other in returned_to)}


def _build_modules(
    model: nn.Module,
    atoms: Sequence[Atom],
    groups: Sequence[Group],
    single: Collection[str],
    uses: Mapping[str, Collection[str]],
) -> tuple[LayerModule, ...]:
    """Make the records; a parameter belongs to the first module that uses it, other names of
    `single` aside.
    """
    names = [atom.name for atom in atoms]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    members = [
        [p for atom in atoms[group.start : group.stop] for p in atom.pieces] for group in groups
    ]
    owners: dict[str, int] = {}
    shared: set[str] = set()
    for index, pieces in enumerate(members):
        for parameter in (
            name for p in pieces for name in p.parameters if p.role != "alias" or name not in single
        ):
            if owners.setdefault(parameter, index) != index:
                shared.add(parameter)
    shared.update(_used_again(model, members, owners, uses))

    def build(index: int, group: Group, pieces: Sequence[Piece]) -> LayerModule:
        owned = tuple(parameter for parameter, owner in owners.items() if owner == index)
        return LayerModule(
            name=_name_group(names, group),
            submodules=tuple(piece.name for piece in pieces if piece.is_submodule),
            parameters=owned,
            num_parameters=sum(sizes[parameter] for parameter in owned),
            tap=atoms[group.stop - 1].tap,
            shared_parameters=tuple(parameter for parameter in owned if parameter in shared),
            reason=group.reason + ".",
        )

    return tuple(
        build(index, *pair) for index, pair in enumerate(zip(groups, members, strict=True))
    )


def _used_again(
    model: nn.Module,
    members: Sequence[Sequence[Piece]],
    owners: Mapping[str, int],
    uses: Mapping[str, Collection[str]],
) -> Iterator[str]:
    """Yield parameters that a layer module behind their own uses without a submodule, as
    `F.linear(x, table.weight)`.

    Lookup tables and what a submodule taken apart holds itself alone: what a block computes of
    others, and keeps for the loss, such as how experts are used, is no other use.
    """
    places = {piece.name: index for index, pieces in enumerate(members) for piece in pieces} | {
        "": len(members) - 1
    }
    tables = {id(part.weight) for part in model.modules() if isinstance(part, TABLES)}
    direct = {
        name
        for pieces in members
        for piece in pieces
        if piece.role == "direct"
        for name in piece.parameters
    }
    for name, at in uses.items():
        is_looked_at = name in direct or id(model.get_parameter(name)) in tables
        if is_looked_at and any(
            places.get(place, -1) > owners.get(name, len(members)) for place in at
        ):
            yield name


def _name_group(names: Sequence[str], group: Group) -> str:
    """Name a group after its stage where it is the whole of one, else after its first and last
    atom.
    """
    inside = names[group.start : group.stop]
    if len(inside) == 1:
        return inside[0]
    stage = parent_of(inside[0])
    while not all(is_under(name, stage) for name in inside):
        stage = parent_of(stage)
    is_whole = bool(stage) and sum(is_under(name, stage) for name in names) == len(inside)
    return stage if is_whole else f"{inside[0]}-{inside[-1]}"
