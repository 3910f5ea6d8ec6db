"""Cuts a model into layer modules, once, by what its first passes showed (paper §4.2.1)."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from egeria import tree
from egeria.config import ModulesConfig
from egeria.errors import UnsupportedModelError
from egeria.model.group import ATOMS, Group, Piece, find_pieces, group_atoms, name_group, tables_in
from egeria.model.watch import Node, Watch, reach, sinks


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerModule:
    """Consecutive layers that are evaluated and frozen as one unit."""

    name: str  # short and unique: "layer1", or "layer3.0-layer3.2" for a part of a stage
    submodules: tuple[str, ...]  # dotted names, front to back; none lies inside another
    parameters: tuple[str, ...]  # those that freeze with it, as in `model.named_parameters()`
    num_parameters: int  # elements of all its parameters, also of those that never train
    tap: str  # the submodule whose output is the output of this module
    share: float  # of the multiplications in a forward pass (elements of matrices times rows)
    reason: str  # why it is cut here, in one sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The layer modules of a model in training, and how deep they may be frozen."""

    modules: tuple[LayerModule, ...]  # front to back
    detaches: tuple[bool, ...]  # for each depth, whether the output of the front may be detached
    deepest: int  # the largest number of front modules that may be frozen
    reason: str  # why that is not all but one, in one sentence; empty if it is

    @property
    def trainable(self) -> tuple[bool, ...]:
        """For each layer module, whether it has parameters that freeze with it."""
        return tuple(bool(module.parameters) for module in self.modules)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "Cut":
        """Return the cut that `dataclasses.asdict` made this of; raise if it is something else."""
        return msgspec.convert(entry, cls)

    @classmethod
    def combine(cls, cuts: "Sequence[Cut]") -> "Cut":
        """Return the cut that holds on all ranks, which have the same layer modules."""
        detaches = tuple(map(all, zip(*(cut.detaches for cut in cuts), strict=True)))
        return replace(min(cuts, key=lambda cut: cut.deepest), detaches=detaches)


class _Atom(NamedTuple):
    """A block or unit, the end of its pieces in the line, and where its output is."""

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
    """Cut a model in training, without wrappers, into layer modules, front to back.

    A parameter belongs to the last layer module that uses it.

    `pattern`, `target_share` and `keep` are settings of `[modules]`; under `minimum_share` of the
    parameters a stage joins its neighbour. `tables_apart` makes a lookup table in front of all
    blocks a layer module, if nothing later uses it: it costs little in the passes, and much in the
    optimizer. `watch` is of the first passes; without it the order is that of definition. `order`
    has the names of the pieces that ran, `seen` those of the parameters that received a gradient.

    Raises:
        UnsupportedModelError: there is nothing to freeze or nothing to cut at.
    """
    pieces = find_pieces(model, pattern)
    line = _find_line(pieces, watch, order)
    places = _find_places(model, pieces, line, watch)
    line = _with_table_apart(line, places) if tables_apart and pattern is None else line
    atoms = _find_atoms(line)
    if pattern is None:
        groups = _group(model, atoms, target_share, minimum_share)
    else:
        groups = [Group(i, i + 1, f"The pattern {pattern!r} names it") for i in range(len(atoms))]
    if seen is None:
        seen = {name for name, entry in model.named_parameters() if entry.requires_grad}
    frozen = {name for name in seen if not (keep and re.search(keep, name))}
    work, names = [_count_work(piece, watch) for piece in line], [atom.core.name for atom in atoms]
    stops = [0, *(atoms[group.stop - 1].stop for group in groups)]
    named = [(name, entry) for name, entry in model.named_parameters() if name in places]
    owned = [
        {name: entry.numel() for name, entry in named if start <= places[name] < stop}
        for start, stop in pairwise(stops)
    ]
    return tuple(
        LayerModule(
            name=name_group(names, group),
            submodules=tuple(piece.name for piece in line[start:stop]),
            parameters=tuple(name for name in own if name in frozen),
            num_parameters=sum(own.values()),
            tap=atoms[group.stop - 1].tap,
            share=sum(work[start:stop]) / max(1, sum(work)),
            reason=group.reason + ".",
        )
        for group, own, (start, stop) in zip(groups, owned, pairwise(stops), strict=True)
    )


def settings_of_cut(settings: ModulesConfig, *, is_pretrained: bool) -> dict[str, Any]:
    """Return the arguments of `make_modules` for settings of `[modules]`."""
    is_fine = settings.target_share is None and is_pretrained
    # Plasticity is evaluated one layer module after the other, so few are better; a plan for a
    # pretrained model freezes many, each at its own time.
    share = settings.target_share or (0.1 if is_fine else 0.2)
    return {**asdict(settings), "target_share": share, "tables_apart": is_fine}


@torch.no_grad()
def is_mostly_trained(model: nn.Module) -> bool:
    """Return whether most normalisation layers have been trained, so that this is a fine-tuning.

    Untrained ones have equal weights, 1 or 0, and the statistics of no data. Of sharded parameters
    this looks at the part of this rank.
    """
    norms = [part for part in model.modules() if "norm" in type(part).__name__.lower()]
    told = list[bool]()  # for each with such numbers, whether it was trained
    for norm in norms:
        own = [getattr(norm, name, None) for name in ("weight", "running_mean")]
        vectors = [e for e in own if isinstance(e, Tensor) and e.dim() == 1 and not e.is_meta]
        parts = [tree.own_part(e) for e in vectors if e.is_floating_point()]
        if parts:
            told.append(not all(bool((part == part[:1]).all()) for part in parts))
    return 2 * sum(told) > len(told)


def _find_line(
    pieces: Sequence[Piece], watch: Watch | None, order: Iterable[str] | None
) -> list[Piece]:
    """Return the pieces that ran, in the order of their last calls; without a pass, all."""
    nodes = set() if watch is None else reach(watch.outputs)
    if any("CheckpointFunction" in node.name() for node in nodes):
        raise UnsupportedModelError(
            "A reentrant checkpoint hides what runs in it, and loses gradients after a frozen "
            "layer. Give `checkpoint`, or gradient_checkpointing_kwargs, use_reentrant=False."
        )
    by_name = {piece.name: piece for piece in pieces if piece.role != "direct"}
    if order is None:
        order = by_name if watch is None else watch.order
    return [by_name[name] for name in order if name in by_name]


def _find_places(
    model: nn.Module, pieces: Sequence[Piece], line: Sequence[Piece], watch: Watch | None
) -> dict[str, int]:
    """Return for each parameter the index in `line` of the last piece that uses it.

    The graph tells where these are used: lookup tables, and parameters that no piece in `line`
    holds, such as a class token. What it does not have is used after all pieces, as in the loss.
    Without a graph, parameters of a submodule around pieces count as used in front.
    """
    places = {name: index for index, piece in enumerate(line) for name in piece.parameters}
    uses = {} if watch is None else _find_uses(model, line, watch)
    asked, ran = tables_in(model), set(line)
    for piece in pieces:
        is_in_front = piece in ran or (piece.role == "direct" and not uses)
        for name in piece.parameters:
            if piece not in ran or model.get_parameter(name) in asked:
                use = uses.get(name, 0 if is_in_front else len(line) - 1)
                places[name] = max(places.get(name, 0), use)
    return places


def _find_uses(model: nn.Module, line: Sequence[Piece], watch: Watch) -> dict[str, int]:
    """Return for each parameter in the graph the index of the last piece that reads it itself."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    uses: dict[str, int] = {}
    passed: set[Node] = set()
    for index, ends in enumerate([*(watch.nodes[piece.name] for piece in line), watch.outputs]):
        found = {getattr(node, "variable", None) for node in reach(ends, passed)}
        uses |= {names[leaf]: min(index, len(line) - 1) for leaf in found if leaf in names}
        passed.update(ends)
    return uses


def _with_table_apart(line: list[Piece], places: Mapping[str, int]) -> list[Piece]:
    """Make a block of the first piece with a lookup table of its own, if no atom precedes it."""
    for index, piece in enumerate(line):
        if piece.role in ATOMS:
            break
        if tables_in(piece.module) and all(places[name] == index for name in piece.parameters):
            return [*line[:index], replace(piece, role="block"), *line[index + 1 :]]
    return line


def _find_atoms(line: Sequence[Piece]) -> list[_Atom]:
    """Assign every piece to a block or unit: to the next one; a head or a norm to the last one."""
    atoms: list[_Atom] = []
    for stop, piece in enumerate(line, start=1):
        normalises = bool(atoms and piece.parameters and atoms[-1].core.role == "unit")
        if piece.role in ATOMS:
            atoms.append(_Atom(piece, stop, piece.name))
        elif normalises or (atoms and stop == len(line)):
            tap = piece.name if normalises else atoms[-1].tap
            atoms[-1] = atoms[-1]._replace(stop=stop, tap=tap)
    if len(atoms) < 2:
        raise UnsupportedModelError(
            "A model must have at least two layers or blocks that run, found "
            f"{[atom.core.name for atom in atoms]}. Make its parts submodules, and call them: "
            "block(x), not block.forward(x)."
        )
    return atoms


def _group(
    model: nn.Module, atoms: Sequence[_Atom], target_share: float, minimum_share: float
) -> list[Group]:
    """Group atoms by size; large vocabularies do not count."""
    named, tables = dict(model.named_parameters()), tables_in(model)
    cores, shapes = [atom.core for atom in atoms], {table.shape for table in tables}
    weights = {core: set(core.module.parameters()) - tables for core in cores}
    have_matrices = [core for core in cores if any(p.ndim >= 2 for p in weights[core])]
    inside = {name for core in have_matrices for name in core.parameters}
    counted = (p for name, p in named.items() if name in inside or p.shape not in shapes)
    total, names = sum(parameter.numel() for parameter in counted), [core.name for core in cores]
    sizes = [sum(named[name].numel() for name in core.parameters) for core in cores]
    return group_atoms(names, sizes, total, target_share=target_share, minimum_share=minimum_share)


def _count_work(piece: Piece, watch: Watch | None) -> int:
    """Count the multiplications of a piece: elements of its matrices times rows."""
    factors = set(piece.module.parameters()) - tables_in(piece.module)
    size = sum(parameter.numel() for parameter in factors if parameter.ndim >= 2)
    return size * (1 if watch is None else watch.rows[piece.name])


def read_graph(
    model: nn.Module, modules: Sequence[LayerModule], watch: Watch, trained: Collection[Tensor] = ()
) -> Cut:
    """Return the cut of these layer modules, by the graph of the first passes.

    `trained` is all that the optimizers train, also tensors that are not in the model.
    """
    graph = _Graph(model, modules, watch, trained)
    limits = [(len(modules) - 1, ""), graph.limit_of_outputs(), *graph.limits_of_the_loop()]
    deepest, reason = min(limits, key=lambda limit: limit[0])
    detaches = tuple(graph.may_detach(depth) for depth in range(len(modules)))
    return Cut(modules=tuple(modules), detaches=detaches, deepest=deepest, reason=reason)


class _Graph:
    """Where the layer modules stand in the graph of the first passes."""

    def __init__(
        self, model: nn.Module, modules: Sequence[LayerModule], watch: Watch, trained: Any
    ) -> None:
        self._modules, self._watch, self._nodes = modules, watch, watch.nodes
        # The outputs that must keep a gradient: in each backward pass those with a gradient that no
        # other one is computed from, as logits are computed from keys and values. If none has a
        # gradient, the outputs that no other one is computed from.
        found = [output for outputs in watch.reached.values() for output in sinks(outputs)]
        self._outputs = set(found or sinks(watch.outputs))
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._trains = {name for parameter, name in names.items() if parameter.requires_grad}
        self._trains.update(*(module.parameters for module in modules))
        # The parameters that train in each submodule.
        self._held = {
            name: self._trains.intersection(map(names.get, model.get_submodule(name).parameters()))
            for module in modules
            for name in module.submodules
        }
        # The leaves of the graph: parameters of the model, inputs, and tensors that an optimizer
        # trains but the model does not have; a hook, say, brings them in.
        leaves = {n: n.variable for n in reach(self._outputs) if hasattr(n, "variable")}
        self._leaves = {node: names[leaf] for node, leaf in leaves.items() if leaf in names}
        self._inputs = {n for n, leaf in leaves.items() if not isinstance(leaf, nn.Parameter)}
        self._outside = {n for n, leaf in leaves.items() if leaf not in names and leaf in trained}

    def limit_of_outputs(self) -> tuple[int, str]:
        """Return the depth beyond which an output would have no gradient, and why."""
        marks, lasts = list[set[Node]](), set[int]()
        for module in self._modules:  # the nodes of its trainable parts
            own = set(module.parameters)
            parts = [name for name in module.submodules if self._held[name] & own]
            loose = own.difference(*(self._held[name] for name in parts))
            called = {node for name in parts for node in self._nodes[name]}
            marks.append(called | {node for node, name in self._leaves.items() if name in loose})
        for output in self._outputs:
            nodes = reach([output])
            lasts.update([i for i, mark in enumerate(marks) if mark & nodes][-1:])
        trained = [index for index, module in enumerate(self._modules) if module.parameters]
        last = min(lasts, default=max(trained, default=0))  # if no output is known
        name = self._modules[last].name
        return last, f"an output depends on nothing after {name} that trains"

    def limits_of_the_loop(self) -> Iterator[tuple[int, str]]:
        """Yield depths beyond which something else in the loop would fail, and why."""
        modules = self._modules
        owners = {name: index for index, module in enumerate(modules) for name in module.parameters}
        for names in self._watch.passes.values():
            if names <= owners.keys():
                last = max(owners[name] for name in names)
                reached = f"reaches nothing after {modules[last].name} that trains"
                yield last, f"a backward pass of its own {reached}; add its loss to the others"
        for name in self._watch.asked & owners.keys():
            reason = "is asked for by torch.autograd.grad, which fails if nothing requires it"
            yield owners[name], f"the gradient of {name} {reason}"
        for index, module in enumerate(modules):
            for name in self._watch.read.intersection(module.submodules):
                reason = "is read (retain_grad, a hook), which fails if nothing requires it"
                yield index, f"the gradient of the output of {name} {reason}"

    def may_detach(self, depth: int) -> bool:
        """Return whether the output of the first `depth` layer modules may be detached.

        What still trains in front of the boundary must train after it too (tied weights). Neither
        it nor an input in front may be reached around the boundary (an embedding that a decoder
        uses too), and no later layer module may be in front (a block that is called twice), nor a
        trained tensor outside of the model.
        """
        edge = set(self._nodes[self._modules[depth - 1].tap]) if depth else None
        if not edge:
            return False
        front = {name for module in self._modules[:depth] for name in module.submodules}
        frozen = {name for module in self._modules[:depth] for name in module.parameters}
        later = {name for module in self._modules[depth:] for name in module.parameters}
        alive = {name: held - frozen for name, held in self._held.items() if held - frozen}
        before = reach(edge)
        inside = {self._leaves[node] for node in before if node in self._leaves}
        inside = (inside & self._trains - frozen).union(*(alive[n] for n in alive if n in front))
        sources = {node for name in alive if name in front for node in self._nodes[name]}
        others = {node for name in alive if name not in front for node in self._nodes[name]}
        around = reach(self._outputs, edge)
        is_free = self._outside.isdisjoint(before) and others.isdisjoint(before - edge)
        is_behind = inside <= later and sources.union(self._inputs & before).isdisjoint(around)
        return is_free and is_behind
