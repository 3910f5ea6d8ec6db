"""Cutting a model once into layer modules, from what the first passes showed (paper §4.2.1)."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from egeria.config.checks import SHARE, check, optional, regular_expression
from egeria.errors import StateError, UnsupportedModelError
from egeria.model.group import (
    ATOMS,
    Group,
    Piece,
    find_pieces,
    group_atoms,
    is_under,
    parent_of,
    tables_in,
)
from egeria.model.watch import Node, Watch, reach, sinks


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerModule:
    """Consecutive layers that are judged and frozen as one unit.

    Attributes:
        name: short and unique: "layer1", or "layer3.0-layer3.2" for a part of a stage.
        submodules: dotted names of what belongs to it, front to back; none lies inside another.
        parameters: those that freeze with it, as in `model.named_parameters()`.
        num_parameters: elements of all parameters in it, also of those that never train.
        tap: the submodule whose output is the output of this module.
        share: of the multiplications of a forward pass (elements of matrices times rows).
        reason: why it is cut here, in one sentence.
    """

    name: str
    submodules: tuple[str, ...]
    parameters: tuple[str, ...]
    num_parameters: int
    tap: str
    share: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The layer modules of a model in training, and the facts that say how deep it can freeze.

    Attributes:
        modules: front to back.
        trainable: of each module, whether any parameter freezes with it.
        needs: of each output that counts, the modules with something to train that it depends on.
        detaches: for each depth, whether the output of the frozen front may be detached. Where it
            may not, that would lose a gradient of what still trains, or save nothing.
        is_reentrant: whether a reentrant checkpoint runs, whose input must require a gradient.
        deepest: the largest number of front modules that may be frozen.
        reason: why that is not all but one, in one sentence; empty where it is.
    """

    modules: tuple[LayerModule, ...]
    trainable: tuple[bool, ...]
    needs: tuple[tuple[int, ...], ...]
    detaches: tuple[bool, ...]
    is_reentrant: bool
    deepest: int
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the cut as plain data, which JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Cut:
        """Return what `to_dict` was called on; StateError if it is anything else."""
        cut = _read(cls, entry)
        cut = replace(cut, modules=tuple(_read(LayerModule, module) for module in cut.modules))
        count, used = len(cut.modules), {0, cut.deepest}.union(*cut.needs)
        if {len(cut.trainable), len(cut.detaches)} != {count} or not used <= set(range(count)):
            raise StateError(
                f"A saved cut must state facts of each of its {count} layer modules, found others. "
                "Load a state as it was saved."
            )
        return cut

    @classmethod
    def combine(cls, cuts: Sequence[Cut]) -> Cut:
        """Return what holds on all ranks, which have the same layer modules."""
        return replace(
            min(cuts, key=lambda cut: cut.deepest),
            needs=tuple(sorted({need for cut in cuts for need in cut.needs})),
            detaches=tuple(map(all, zip(*(cut.detaches for cut in cuts), strict=True))),
            is_reentrant=any(cut.is_reentrant for cut in cuts),
        )


# By annotation of a field: its type, or in a list that of its entries.
_TYPES: dict[str, Any] = {
    **{"str": str, "int": int, "float": float, "bool": bool, "tuple[str, ...]": [str]},
    **{"tuple[bool, ...]": [bool], "tuple[tuple[int, ...], ...]": [[int]]},
    "tuple[LayerModule, ...]": [Mapping],
}
_Record = TypeVar("_Record", LayerModule, Cut)


def _read(cls: type[_Record], entry: Any) -> _Record:
    """Return a record from plain data with exactly its fields; lists become tuples."""
    types = {field.name: _TYPES[str(field.type)] for field in fields(cls)}
    names = set(entry) if isinstance(entry, Mapping) else set()
    wrong = [name for name in types if name in names and not _is_a(entry[name], types[name])]
    if names != set(types) or wrong:
        raise StateError(
            f"A saved {cls.__name__} must have the fields {sorted(types)}, each of its type; found "
            f"{wrong or sorted(names)}. Load it with the version of egeria that saved it."
        )
    return cls(**{name: _tuples(value) for name, value in entry.items()})


def _is_a(value: Any, kind: Any) -> bool:
    if isinstance(kind, list):
        return isinstance(value, (list, tuple)) and all(_is_a(item, kind[0]) for item in value)
    return isinstance(value, kind) and (kind is bool) == isinstance(value, bool)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


class _Atom(NamedTuple):
    """A block or unit, the end of what goes with it in the line of pieces, and its output."""

    core: Piece
    stop: int
    tap: str


def make_modules(
    model: nn.Module,
    *,
    pattern: str | None = None,
    target_share: float = 0.2,
    minimum_share: float = 0.005,
    tables_apart: bool = False,
    keep: str | None = None,
    watch: Watch | None = None,
    order: Sequence[str] | None = None,
    seen: Collection[str] | None = None,
) -> tuple[LayerModule, ...]:
    """Cut a model into layer modules, front to back.

    A parameter belongs to the last layer module that uses it. One that no submodule which ran holds
    (a class token, a temperature) is looked for in the graph; where it is not found there, it was
    used behind all of them, as in the loss.

    Args:
        model: the model in training, without wrappers.
        pattern: regular expression; each outermost submodule whose name it matches in full becomes
            a layer module, with no regard to size.
        target_share: share of all parameters that a layer module aims at; vocabularies do not
            count.
        minimum_share: share of them under which a stage joins its neighbour.
        tables_apart: whether a submodule in front of all blocks that holds a lookup table which
            nothing behind uses is a layer module of its own: it costs little in the passes, and
            much in the optimizer.
        keep: regular expression; parameters in whose names it is found never freeze.
        watch: of the first passes. Without it the order is that of definition, and each weight
            counts the same in `share`.
        order: names of the pieces that ran, in execution order; those of `watch` where it is None.
        seen: names of the parameters that received a gradient, which alone can freeze; all that
            require one where it is None.

    Raises:
        UnsupportedModelError: there is nothing to freeze or nothing to cut at.
        ConfigError: an argument is outside its contract.
    """
    check("modules.target_share", target_share, SHARE)
    check("modules.minimum_share", minimum_share, SHARE)
    check("modules.keep", keep, optional(regular_expression))
    pieces = find_pieces(model, pattern)
    if order is None and watch is not None:
        order = [name for name in watch.order if name not in watch.silent]
    by_name = {piece.name: piece for piece in pieces if piece.role != "direct"}
    line = [by_name[name] for name in (by_name if order is None else order) if name in by_name]
    places = _find_places(model, pieces, line, watch)
    if tables_apart and pattern is None:
        line = _with_table_apart(line, places)
    atoms = _find_atoms(line)
    if len(atoms) < 2:
        raise UnsupportedModelError(
            "A model must have at least two layers or blocks that run, found "
            f"{[atom.core.name for atom in atoms]}; the last one never freezes. Make its parts "
            "submodules, and call them: block(x), not block.forward(x)."
        )
    groups = [
        Group(index, index + 1, f"The pattern {pattern!r} names it") for index in range(len(atoms))
    ]
    if pattern is None:
        groups = _group(model, atoms, target_share, minimum_share)
    frozen = {
        name
        for name, parameter in model.named_parameters()
        if (parameter.requires_grad if seen is None else name in seen)
        and not (keep and re.search(keep, name))
    }
    work = [_count_work(piece, watch) for piece in line]
    return _build(model, atoms, groups, places, frozen, line=line, work=work)


def _find_places(
    model: nn.Module, pieces: Sequence[Piece], line: Sequence[Piece], watch: Watch | None
) -> dict[str, int]:
    """Return for each parameter the index in `line` of the last piece that uses it.

    For what no piece in `line` holds, for lookup tables, and for parts that have a second name
    outside their piece, the graph is asked. For others it is not: blocks may keep a loss of their
    own until the end, which is no other use of their weights.
    """
    places = {name: index for index, piece in enumerate(line) for name in piece.parameters}
    uses = {} if watch is None else _find_uses(model, line, watch)
    asked, ran = tables_in(model) | _reused(model, pieces), set(line)
    for piece in pieces:
        is_known = piece.role != "direct" or bool(uses)
        default = len(line) - 1 if is_known else _first_inside(piece.name, line)
        for name in piece.parameters:
            if piece not in ran or model.get_parameter(name) in asked:
                use = uses.get(name, 0 if piece in ran else default)
                places[name] = max(places.get(name, 0), use)
    return places


def _reused(model: nn.Module, pieces: Iterable[Piece]) -> set[nn.Parameter]:
    """Return the parameters of submodules that have another name, outside of their piece."""
    homes = {part: piece.name for piece in pieces for part in piece.module.modules()}
    named = model.named_modules(remove_duplicate=False)
    return {
        parameter
        for name, part in named
        if part in homes and name != homes[part] and not is_under(name, homes[part])
        for parameter in part.parameters()
    }


def _find_uses(model: nn.Module, line: Sequence[Piece], watch: Watch) -> dict[str, int]:
    """Return for each parameter in the graph the index of the last piece that it is in front of."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    uses: dict[str, int] = {}
    passed: set[Node] = set()
    for index, ends in enumerate([*(watch.nodes[piece.name] for piece in line), watch.outputs]):
        found = {getattr(node, "variable", None) for node in reach(ends, passed)}
        uses |= {names[leaf]: min(index, len(line) - 1) for leaf in found if leaf in names}
        passed.update(ends)
    return uses


def _first_inside(owner: str, line: Sequence[Piece]) -> int:
    """Return the first piece inside a submodule, or else inside the nearest one around it."""
    inside = [index for index, piece in enumerate(line) if is_under(piece.name, owner)]
    return min(inside, default=0) if inside or not owner else _first_inside(parent_of(owner), line)


def _with_table_apart(line: list[Piece], places: Mapping[str, int]) -> list[Piece]:
    """Make the first piece that holds a table of its own a block, if it is in front of all."""
    for index, piece in enumerate(line):
        if piece.role in ATOMS:
            break
        if tables_in(piece.module) and all(places[name] == index for name in piece.parameters):
            return [*line[:index], replace(piece, role="block"), *line[index + 1 :]]
    return line


def _find_atoms(line: Sequence[Piece]) -> list[_Atom]:
    """Give every piece to a block or unit.

    Stem and what lies in between go to the one that follows, the head to the last. What normalises
    the output of a unit goes to that unit.
    """
    atoms: list[_Atom] = []
    for stop, piece in enumerate(line, start=1):
        normalises = bool(atoms and piece.parameters and atoms[-1].core.role == "unit")
        if piece.role in ATOMS:
            atoms.append(_Atom(piece, stop, piece.name))
        elif normalises or (atoms and stop == len(line)):
            tap = piece.name if normalises else atoms[-1].tap
            atoms[-1] = atoms[-1]._replace(stop=stop, tap=tap)
    return atoms


def _group(
    model: nn.Module, atoms: Sequence[_Atom], target_share: float, minimum_share: float
) -> list[Group]:
    """Group atoms by size. Parameters shaped like a table outside of them do not count: next to
    the vocabulary of a multilingual model every stage would look small.
    """
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    tables = tables_in(model)
    shapes = {table.shape for table in tables}
    inside = {
        name
        for atom in atoms
        if any(p.ndim >= 2 and p not in tables for p in atom.core.module.parameters())
        for name in atom.core.parameters
    }
    return group_atoms(
        [atom.core.name for atom in atoms],
        [sum(sizes[name] for name in atom.core.parameters) for atom in atoms],
        sum(
            sizes[name]
            for name, parameter in model.named_parameters()
            if name in inside or parameter.shape not in shapes
        ),
        target_share=target_share,
        minimum_share=minimum_share,
    )


def _count_work(piece: Piece, watch: Watch | None) -> int:
    """Count the multiplications of a piece: elements of its matrices times rows."""
    factors = set(piece.module.parameters()) - tables_in(piece.module)
    size = sum(parameter.numel() for parameter in factors if parameter.ndim >= 2)
    return size * (1 if watch is None else watch.rows[piece.name])


def _build(
    model: nn.Module,
    atoms: Sequence[_Atom],
    groups: Sequence[Group],
    places: Mapping[str, int],
    frozen: Collection[str],
    *,
    line: Sequence[Piece],
    work: Sequence[int],
) -> tuple[LayerModule, ...]:
    stops = [0, *(atoms[group.stop - 1].stop for group in groups)]
    owned: list[dict[str, int]] = [{} for _ in groups]
    for name, parameter in model.named_parameters():
        if name in places:
            owned[bisect_right(stops, places[name]) - 1][name] = parameter.numel()
    return tuple(
        LayerModule(
            name=_name_group([atom.core.name for atom in atoms], group),
            submodules=tuple(piece.name for piece in line[start:stop]),
            parameters=tuple(name for name in own if name in frozen),
            num_parameters=sum(own.values()),
            tap=atoms[group.stop - 1].tap,
            share=sum(work[start:stop]) / max(1, sum(work)),
            reason=group.reason + ".",
        )
        for group, own, (start, stop) in zip(groups, owned, pairwise(stops), strict=True)
    )


def _name_group(names: Sequence[str], group: Group) -> str:
    """Name a group after its stage where it is the whole of one, else after first and last atom."""
    inside = names[group.start : group.stop]
    if len(inside) == 1:
        return inside[0]
    stage = parent_of(inside[0])
    while not all(is_under(name, stage) for name in inside):
        stage = parent_of(stage)
    is_whole = bool(stage) and sum(is_under(name, stage) for name in names) == len(inside)
    return stage if is_whole else f"{inside[0]}-{inside[-1]}"


def read_graph(
    model: nn.Module,
    modules: Sequence[LayerModule],
    watch: Watch,
    trained: Collection[Tensor] = (),
) -> Cut:
    """Add to the layer modules what the graph of the first passes says.

    Where no pass had an output to walk from, nothing may be detached, and the last layer module
    with something to train is left in training.

    Args:
        model: the model in training, without wrappers.
        modules: what it was cut into.
        watch: of the first passes.
        trained: all that the optimizers train, also tensors that are not of the model.
    """
    graph = _Graph(model, modules, watch, trained)
    needs = graph.needs()
    is_reentrant = graph.is_reentrant or bool(watch.hidden)
    passes = [] if is_reentrant else list(watch.passes.values())  # it makes passes of its own
    limits = [(len(modules) - 1, ""), *_find_limits(model, modules, watch, needs, passes)]
    deepest, reason = min(limits, key=lambda limit: limit[0])
    return Cut(
        modules=tuple(modules),
        trainable=tuple(bool(module.parameters) for module in modules),
        needs=tuple(sorted(needs)),
        detaches=tuple(graph.may_detach(depth) for depth in range(len(modules))),
        is_reentrant=is_reentrant,
        deepest=deepest,
        reason=reason,
    )


def _find_limits(
    model: nn.Module,
    modules: Sequence[LayerModule],
    watch: Watch,
    needs: Iterable[tuple[int, ...]],
    passes: Iterable[set[str]],
) -> Iterator[tuple[int, str]]:
    """Yield depths that may not be exceeded, and why."""
    owners = {name: index for index, module in enumerate(modules) for name in module.parameters}
    for need in needs:
        last = max(need, default=0)
        yield last, f"an output depends on nothing behind {modules[last].name} that trains"
    for names in passes:
        if names <= owners.keys():
            last = max(owners[name] for name in names)
            reached = f"reaches nothing behind {modules[last].name} that trains"
            yield last, f"a backward pass of its own {reached}; add its loss to the others"
    for name in watch.asked & owners.keys():
        reason = "is asked for by torch.autograd.grad, which fails where nothing requires it"
        yield owners[name], f"the gradient of {name} {reason}"
    yield from _find_limits_inside(model, modules, watch)


def _find_limits_inside(
    model: nn.Module, modules: Sequence[LayerModule], watch: Watch
) -> Iterator[tuple[int, str]]:
    """Yield depths at which something in a layer module would fail or lose gradients, and why."""
    for index, module in enumerate(modules):
        for name in watch.read.intersection(module.submodules):
            reason = "is read (retain_grad, or a hook on it), which fails where nothing requires it"
            yield index, f"the gradient of the output of {name} {reason}"
        for name in watch.hidden.intersection(module.submodules):
            if not hasattr(model.get_submodule(name), "gradient_checkpointing"):
                reason = "loses gradients behind a frozen layer; use_reentrant=False does not"
                yield index, f"{name} runs in a reentrant checkpoint, which {reason}"


class _Graph:
    """Where the layer modules stand in the graph of the first passes."""

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[LayerModule],
        watch: Watch,
        trained: Collection[Tensor],
    ) -> None:
        self._modules, self._nodes = modules, watch.nodes
        self._outputs = _outputs_that_count(watch)
        names = {parameter: name for name, parameter in model.named_parameters()}
        trains = {name for parameter, name in names.items() if parameter.requires_grad}.union(
            *(module.parameters for module in modules)
        )
        self._held = {
            name: trains.intersection(names[p] for p in model.get_submodule(name).parameters())
            for module in modules
            for name in module.submodules
        }
        everything = reach(self._outputs)
        self.is_reentrant = any("CheckpointFunction" in node.name() for node in everything)
        leaves = {node: node.variable for node in everything if hasattr(node, "variable")}
        self._leaves = {node: names[leaf] for node, leaf in leaves.items() if leaf in names}
        self._inputs = {n for n, leaf in leaves.items() if not isinstance(leaf, nn.Parameter)}
        # What an optimizer trains that is not of the model: a hook, say, brings it in.
        self._outside = {n for n, leaf in leaves.items() if leaf not in names and leaf in trained}
        self._trains = trains

    def needs(self) -> set[tuple[int, ...]]:
        """Return for each output that counts what it depends on; all, if no output is known."""
        marks = [self._mark(module) for module in self._modules]
        reached = [reach([output]) for output in self._outputs]
        needs = {tuple(i for i, mark in enumerate(marks) if mark & nodes) for nodes in reached}
        everything = tuple(i for i, module in enumerate(self._modules) if module.parameters)
        return needs - {()} or {everything}

    def _mark(self, module: LayerModule) -> set[Node]:
        """Return the nodes of what trains in a layer module."""
        own = set(module.parameters)
        parts = [name for name in module.submodules if self._held[name] & own]
        loose = own.difference(*(self._held[name] for name in parts))
        called = {node for name in parts for node in self._nodes[name]}
        return called | {node for node, name in self._leaves.items() if name in loose}

    def may_detach(self, depth: int) -> bool:
        """Return whether the output of the first `depth` layer modules may be detached.

        What still trains in front of the boundary must train behind it too (tied weights). Nothing
        of it may be reached around the boundary (the embedding that a decoder uses as well), nor an
        input in front of it, and no later layer module may be there (a block that is called twice).
        """
        edge = set(self._nodes[self._modules[depth - 1].tap]) if depth else set()
        front = {name for module in self._modules[:depth] for name in module.submodules}
        frozen = {name for module in self._modules[:depth] for name in module.parameters}
        later = {name for module in self._modules[depth:] for name in module.parameters}
        alive = {name: held - frozen for name, held in self._held.items() if held - frozen}
        before = reach(edge)
        inside = {self._leaves[node] for node in before if node in self._leaves}
        inside = (inside & self._trains - frozen).union(*(alive[n] for n in alive if n in front))
        sources = {node for name in alive if name in front for node in self._nodes[name]}
        others = {node for name in alive if name not in front for node in self._nodes[name]}
        return (
            bool(edge)
            and inside <= later
            and self._outside.isdisjoint(before)
            and others.isdisjoint(before - edge)
            and sources.union(self._inputs & before).isdisjoint(reach(self._outputs, edge))
        )


def _outputs_that_count(watch: Watch) -> list[Node]:
    """Return the outputs that must not lose their gradient.

    In each backward pass these are the ones that received a gradient and that no other such output
    is computed from: the keys and values that a model returns beside its logits receive one from
    there. Where no output received any, it is those that no other output is computed from.
    """
    passes: dict[int, list[Node]] = {}
    for output in dict.fromkeys(watch.outputs):
        for task in watch.backwards.get(output, ()):
            passes.setdefault(task, []).append(output)
    found = [output for outputs in passes.values() for output in sinks(outputs)]
    return list(dict.fromkeys(found)) or sinks(watch.outputs)
