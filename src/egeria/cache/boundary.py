"""The end of a frozen front: what the rest of the model reads of it, recorded and given back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.cache.rows import true_positions
from egeria.errors import UncacheableError
from egeria.model.batch import Autocast, Batch
from egeria.model.cut import LayerModule
from egeria.model.hooks import Hook, is_ours, sweep
from egeria.model.undisturbed import capture, undisturbed
from egeria.random_state import seed_random_state

MOST_KINDS = 512
"""Kinds of batches that are remembered, such as lengths to which sentences are padded."""


HOOKED = (
    "there is a forward hook on a frozen layer or a container of some, which would read what "
    "stands in for skipped layers, or a pre-hook on the model, which would run twice; remove it"
)
RECOMPUTED = (
    "the backward pass runs {name} again, from inputs that would be skipped: let no checkpointed "
    "section reach over the boundary of the frozen layers"
)


@dataclass(kw_only=True, slots=True)
class Kind:
    """What the frozen layers give in one kind of call, without the values."""

    blanks: dict[str, Any] = field(default_factory=dict)
    """Of each root, its output with NaN in the place of each tensor."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    """Of what crosses."""


class Record:
    """What the frozen layers did in one forward pass, by hooks on them."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self.kind, self.calls = Kind(), Counter[str]()
        self.saw_backward = self.reads_padding = False
        """Whether a backward pass was seen, and whether its loss depends on what the model gives at
        padding."""
        self.true_positions: Tensor | None = None
        """Of the batch; None where it has no padding."""
        self.autocast: Autocast | None = None
        """Within the front: a wrapper around the forward of a model may turn it on."""
        self.value: Tensor | None = None
        """What crosses: a copy, since an in-place operation behind may overwrite it."""
        self.refusal = ""

    def open(self) -> None:
        """Put the hooks on."""
        for name, root in self._boundary.roots.items():
            root.register_forward_hook(Hook(self, partial(Record._note, name=name)))

    def close(self) -> None:
        """Take the hooks off."""
        for root in self._boundary.roots.values():
            sweep(root, self)

    def await_backward(self, output: Any, batch: Batch) -> None:
        """Note when the backward pass of what a pass gave begins, and whether it needs padding."""
        self.true_positions = true_positions(batch)
        for node in [tensor.grad_fn for tensor in tree.tensors(output)]:
            if node is not None:
                node.register_prehook(self._note_backward)

    def _note_backward(self, gradients: Sequence[Tensor | None]) -> None:
        self.saw_backward = True
        if (kept := self.true_positions) is None:
            return
        try:
            for gradient in gradients:
                if gradient is not None and gradient.shape[:2] == kept.shape:
                    self.reads_padding |= bool(gradient[~kept.to(gradient.device)].any())
        except Exception:  # of a tensor of another kind, in a pass of the user's
            self.reads_padding = True

    def _note(self, _root: nn.Module, _args: Any, output: Any, *, name: str) -> None:
        try:
            self._note_output(output, name)
        except Exception as error:  # in a pass of the user's, which no error of ours may end
            self.refusal = self.refusal or f"what {name} gives cannot be kept ({error})"

    def _note_output(self, output: Any, name: str) -> None:
        if torch._C._current_graph_task_id() != -1:
            self.refusal = RECOMPUTED.format(name=name)
            return
        self.calls[name] += 1
        if self.calls[name] > 1:
            return
        self.refusal = self.refusal or _refusal(name, output)
        self.kind.blanks[name] = tree.map_tensors(_blank, output)
        found = tree.first_activation(output)
        if name == self._boundary.tap and found is not None:
            self.autocast = Autocast.current(found.device.type)
            self.kind.shape, self.kind.stride = tuple(found.shape), found.stride()
            self.value = found.detach().clone()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How what crosses is taken apart by sample."""

    axis: int
    """Of the samples."""
    order: tuple[int, ...]
    """Of all axes: that of the samples, and the others from the largest stride to the smallest, so
    that rows are plain memory."""
    length_axis: int | None = None
    """Of a row that follows the length of its sequence, where padding is cut."""
    cut_names: frozenset[str] = frozenset()
    """Of the arguments that are cut with it."""

    @classmethod
    def of(cls, value: Tensor, axis: int) -> Layout:
        """Return the layout of a tensor with this axis of samples."""
        others = sorted(range(value.dim()), key=value.stride().__getitem__, reverse=True)
        return cls(axis=axis, order=(axis, *(other for other in others if other != axis)))

    def split(self, value: Tensor, lengths: Sequence[int] | None) -> list[Tensor]:
        """Return the rows of what crosses, on the CPU, cut to their lengths."""
        rows = value.permute(self.order).cpu()
        if self.length_axis is None or lengths is None:
            return list(rows)
        cut = zip(rows, lengths, strict=True)
        return [row.narrow(self.length_axis, 0, length) for row, length in cut]

    def join(self, rows: Sequence[Tensor], kind: Kind, device: torch.device) -> Tensor | None:
        """Return what crosses for a batch of a kind; None where the rows do not fit it."""
        num_rows, *shape = (kind.shape[axis] for axis in self.order)
        if self.length_axis is None:
            if num_rows != len(rows) or any(list(row.shape) != shape for row in rows):
                return None
            found = torch.stack(list(rows))
        else:
            found = rows[0].new_zeros(num_rows, *shape)
            for place, row in zip(found, rows, strict=True):
                place.narrow(self.length_axis, 0, row.shape[self.length_axis]).copy_(row)
        found = found.permute(sorted(range(found.dim()), key=self.order.__getitem__))
        if found.stride() != kind.stride and math.prod(kind.shape) == _span(kind):
            plain = torch.empty_strided(kind.shape, kind.stride, dtype=found.dtype)
            found = plain.copy_(found)
        return found.to(device, non_blocking=True)


class Boundary:
    """The frozen front of a model, of whose outputs the rest reads one: that of the last layer.

    Frozen submodules (*roots*) that are called once in a pass are left out by giving their outputs
    back: what crosses at the tap, NaN elsewhere, so that whatever else is read shows.

    Args:
        model: the model, without wrappers around it.
        modules: its frozen layer modules, front to back.

    Raises:
        UncacheableError: they cannot be left out; the message is the reason.
    """

    def __init__(self, model: nn.Module, modules: Sequence[LayerModule]) -> None:
        self.model, self.tap, self.name = model, modules[-1].tap, modules[-1].name
        found = {model.get_submodule(name): name for m in modules for name in m.submodules}
        self.roots = {name: root for root, name in found.items()}
        inside = {part for root in self.roots.values() for part in root.modules()}
        self._watched = [
            m for m in model.modules() if m is not model and not inside.isdisjoint(m.modules())
        ]
        names = {name for module in modules for name in module.parameters}
        self._slots = [
            (part._parameters, key, weight)
            for path, part in model.named_modules(remove_duplicate=False)
            for key, weight in part.named_parameters(recurse=False)
            if part in inside or f"{path}.{key}".removeprefix(".") in names
        ]
        self.weights: list[Any] = [weight for *_, weight in self._slots]
        self.weights += [entry for root in self.roots.values() for entry in root.buffers()]
        self.device = next((weight.device for weight in self.weights), torch.device("cpu"))
        self.layout: Layout | None = None
        """Known once `prove` has found it."""
        self.limit = 0.0  # relative difference that counts as rounding; known then too
        self.ignores_padding = False
        """Whether a loss was seen that does not depend on what the model gives at padding."""
        self.live: frozenset[str] = frozenset()
        """Roots that run all the same: look-ups that depend on no frozen output."""
        self.independent: set[str] | None = None
        """While it is being proven: roots that were given no NaN."""
        self._kinds: dict[Hashable, Kind] = {}
        self._ran = set[str]()
        """Roots that run up to what crosses."""
        self._check_front()

    @property
    def versions(self) -> int:
        """A number that changes with each write to a frozen parameter that torch counts, and where
        one is switched on or replaced; buffers are copied in every pass of DistributedDataParallel.
        """
        found: Any = self._slots
        return sum(w._version + w.requires_grad + (table.get(k) is not w) for table, k, w in found)

    @property
    def is_replaced(self) -> bool:
        """Whether a frozen parameter has another in its place, for a pass or for good."""
        return any(table.get(key) is not weight for table, key, weight in self._slots)

    @property
    def is_hooked(self) -> bool:
        """Whether a hook is where HOOKED says; those that compute weights are fine."""
        found = [*self.model._forward_pre_hooks.values()]
        for module in self._watched:
            found += (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        return any(
            not is_ours(hook) and not getattr(hook, "__module__", "").startswith("torch.nn.utils.")
            for hook in found
        )

    def kind(self, batch: Batch) -> Kind | None:
        """Return what is known of calls like this one; None for a new kind."""
        return self._kinds.get(signature(batch))

    def learn(self, batch: Batch, record: Record) -> tuple[Kind, Tensor]:
        """Return the kind of call that a recorded pass was, which is remembered, and what crossed.

        Raises:
            UncacheableError: the frozen layers did not run as when the boundary was proven.
        """
        require(not record.refusal, record.refusal)
        stubs = {name for name, count in record.calls.items() if count == 1}
        require(
            self.tap in stubs and record.value is not None,
            f"{self.tap} is called {record.calls[self.tap]} times in a forward pass, or gives no "
            "tensor",
        )
        assert record.value is not None
        record.kind.blanks = {name: record.kind.blanks[name] for name in stubs}
        known = next(iter(self._kinds.values()), None)
        if known is None:
            calls = list(record.calls)
            self._ran = {*calls[: calls.index(self.tap) + 1]}
        else:
            differing = next(iter(stubs ^ known.blanks.keys()), "")
            require(not differing, f"{differing} does not run in each forward pass")
        if len(self._kinds) < MOST_KINDS:
            self._kinds.setdefault(signature(batch), record.kind)
        return record.kind, record.value

    @contextmanager
    def replaying(self, kind: Kind, value: Tensor) -> Iterator[None]:
        """Leave the frozen layers out of the forward pass in the block, which is given `value`.

        Raises:
            UncacheableError: behind the block: one was not called once.
        """
        skipped, calls = kind.blanks.keys() - self.live, Counter[str]()
        tables = {name: vars(self.roots[name]) for name in skipped}
        before = {name: table["forward"] for name, table in tables.items() if "forward" in table}
        try:
            for name, table in tables.items():
                own = value if name == self.tap else None
                table["forward"] = partial(self._answer, name, kind.blanks[name], own, calls)
            yield
        finally:
            for name, table in tables.items():
                table.pop("forward", None)
                if name in before:
                    table["forward"] = before[name]
        odd = next((name for name in skipped if calls[name] != 1), "")
        require(not odd, f"{odd} was called {calls[odd]} times in a pass that leaves it out")

    def close(self) -> None:
        """Take off the hooks of all records, also of one whose own `close` was interrupted."""
        for root in self.roots.values():
            owners = [getattr(hook, "owner", None) for hook in root._forward_hooks.values()]
            for owner in owners:
                if isinstance(owner, Record):
                    sweep(root, owner)

    def run_front(self, batch: Batch) -> Tensor:
        """Return what crosses for a batch, by a pass of our own with other random numbers."""
        record = Record(self)
        with undisturbed(self.model, as_training=True):
            seed_random_state(self.model, 1)
            record.open()  # the hooks go with the end of the block
            capture(self.model, self.tap, batch)
        odd = next(iter(record.calls.keys() ^ self._ran), "")
        require(not odd, f"{odd} does not run for all rows alike")
        assert record.value is not None
        return record.value

    def _answer(
        self,
        name: str,
        blanks: Any,
        value: Tensor | None,
        calls: Counter[str],
        *given: Any,
        **named: Any,
    ) -> Any:
        """Answer for a root that is left out."""
        calls[name] += 1
        if self.independent is not None and not has_nan((given, named)):
            self.independent.add(name)
        left = [value] if value is not None else []

        def pick(blank: Tensor) -> Tensor:
            # A copy, since operations of the model may write into it.
            is_value = bool(left) and blank.is_floating_point() and blank.dim() > 1
            return left.pop() if is_value else blank.clone()

        return tree.map_tensors(pick, blanks)

    def _check_front(self) -> None:
        trained = [weight for weight in self.weights if weight.requires_grad]
        require(
            not trained,
            "a weight of the frozen layers is in training still, and what they give changes with "
            "it; if it is tied to a layer behind them, untie it, or set its requires_grad to False",
        )
        plain = (Tensor, nn.Parameter)
        odd = next((type(w).__name__ for w in self.weights if type(w) not in plain), "")
        require(not odd, f"weights of the frozen layers are a tensor subclass ({odd})")
        require(not self.is_hooked, HOOKED)


def require(condition: bool, reason: str) -> None:
    """Raise UncacheableError with the reason where a condition does not hold."""
    if not condition:
        raise UncacheableError(reason)


def signature(batch: Batch) -> Hashable:
    """Return a value that is equal for calls that run alike: by shapes, types and plain values."""
    told = (
        (name, value.shape, value.dtype, value.device)
        if isinstance(value, Tensor)
        else (name, repr(value))
        for name, value in batch.contents
    )
    return (batch.autocast, *told)


def has_nan(output: Any) -> bool:
    """Return whether a tensor that a pass gave, also one in an object, has a NaN in it; waits once
    for each device.
    """
    found = [e for e in tree.tensors(output) if e.is_floating_point() and e.numel()]
    flags = [entry.detach().sum().isnan() for entry in found]
    devices = {flag.device for flag in flags}
    return any(bool(torch.stack([f for f in flags if f.device == d]).any()) for d in devices)


def _refusal(name: str, output: Any) -> str:
    """Return why what a root gives cannot be stored; empty where it can."""
    if tree.requires_grad(output):
        return f"what {name} gives needs a gradient: something in front of it is in training"
    plain = list(tree.leaves(output))
    odd = [t for t in plain if type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided]
    if odd or len(plain) != len(tree.tensors(output)):
        return (
            f"{name} gives an object of its own with tensors inside, which cannot be stored; "
            "return tensors, tuples or dictionaries"
        )
    return ""


def _blank(tensor: Tensor) -> Tensor:
    """Return NaN in the shape of a tensor, which takes no memory; for integers another value."""
    if tensor.is_floating_point() or tensor.is_complex():
        one = torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device)
    else:
        one = torch.full_like(tensor.new_empty(()), 0 if bool(tensor.any()) else 1)
    return one.expand(tensor.shape)


def _span(kind: Kind) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(kind.shape, kind.stride, strict=True))
