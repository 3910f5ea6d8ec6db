"""The end of a frozen front: records what the rest of the model reads, and gives it back."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.cache.rows import true_positions
from egeria.errors import UncacheableError
from egeria.model.cut import LayerModule
from egeria.model.hooks import Hook, is_ours, remove
from egeria.model.passes import Autocast, Batch

HOOKED = (
    "there is a forward hook on a frozen layer or a module around some, which would read the "
    "stand-ins of skipped layers, or a pre-hook on the model, which would run twice; remove it"
)
RECOMPUTED = (
    "the backward pass runs {name} again, from inputs that would be skipped: let no checkpointed "
    "section reach over the boundary of the frozen layers"
)
TRAINED = (
    "a weight of the frozen layers still trains, and their outputs change with it; if it is tied "
    "to a later layer, untie it, or set its requires_grad to False"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """The outputs of the frozen layers in one kind of call, without their values."""

    blanks: dict[str, Any]  # for each root that is skipped, its output with NaN for each tensor
    crossing: Tensor  # shape, strides and dtype of what crosses, on the meta device


class Record:
    """What the frozen layers gave in a forward pass, and what its backward pass showed."""

    def __init__(self, tap: str) -> None:
        self._tap = tap
        self.calls, self.blanks = Counter[str](), dict[str, Any]()
        self.value: Tensor | None = None  # what crosses: a copy, which nothing overwrites
        self.autocast: Autocast | None = None  # within the front: the model may turn it on
        self.refusal = ""
        self.true_positions: Tensor | None = None  # of the batch; None without padding
        self.saw_backward = False
        self.reads_padding = False  # whether the loss depends on the output at padding

    def note(self, *given: Any, name: str) -> None:
        """Note what a root gave, the last argument, in a pass of the user's, which must go on."""
        output = given[-1]
        self.calls[name] += 1
        if torch._C._current_graph_task_id() != -1:
            self.refusal = RECOMPUTED.format(name=name)
        if self.refusal or self.calls[name] > 1:
            return
        try:
            require(
                not tree.requires_grad(output),
                f"what {name} gives needs a gradient: something in front of it is in training",
            )
            require(
                len(list(tree.leaves(output))) == len(tree.tensors(output)),
                f"{name} gives an object of its own with tensors inside, which cannot be stored; "
                "return tensors, tuples or dictionaries",
            )
            self.blanks[name] = tree.map_tensors(_blank, output)
            found = tree.first_activation(output)
            if name == self._tap and found is not None:
                self.autocast = Autocast.current(found.device.type)
                self.value = found.detach().clone()
        except UncacheableError as error:
            self.refusal = str(error)
        except Exception as error:
            self.refusal = f"what {name} gives cannot be kept ({error})"

    def await_backward(self, output: Any, batch: Batch) -> None:
        """Note when the backward pass of an output begins, and whether it reads padding."""
        self.true_positions = true_positions(batch)
        for tensor in tree.tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._note_backward)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How what crosses [B, ...] is divided into samples."""

    limit: float  # relative difference that counts as rounding
    # The arguments that are cut to the lengths of their rows, as what crosses [B, T, ...] is.
    # Empty if padding counts.
    cut_names: frozenset[str] = frozenset()

    def split(self, value: Tensor, lengths: Sequence[int] | None) -> list[Tensor]:
        """Return the rows of what crosses, on the CPU, cut to their lengths."""
        rows = list(value.cpu())
        if not self.cut_names or lengths is None:
            return rows
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def join(self, rows: Sequence[Tensor], kind: Kind, device: torch.device) -> Tensor | None:
        """Return what crosses for a batch of a kind; None if the rows do not fit it."""
        make = torch.zeros_like if self.cut_names else torch.empty_like
        found = make(kind.crossing, device="cpu")
        for whole, row in zip(found, rows, strict=True):
            place = whole[: len(row)] if self.cut_names else whole
            if place.shape != row.shape:
                return None
            place.copy_(row)
        return found.to(device, non_blocking=True)


class Boundary:
    """The frozen front of a model; the rest may read only the output of its last layer.

    Frozen submodules (*roots*) that are called once in a pass are skipped by giving their outputs
    back: what crosses at the tap, and NaN elsewhere, which shows if it is read. Look-ups in tables
    run all the same: they cost little, and later layers may read them too.

    Raises:
        UncacheableError: the layer modules cannot be skipped; the message is the reason.
    """

    def __init__(self, model: nn.Module, modules: Sequence[LayerModule]) -> None:
        self.model, self.tap, self.name = model, modules[-1].tap, modules[-1].name
        found = {model.get_submodule(name): name for m in modules for name in m.submodules}
        self.roots = {name: root for root, name in found.items()}
        inside = {part for root in self.roots.values() for part in root.modules()}
        within = [module for module in model.modules() if module is not model]
        self._watched = [each for each in within if not inside.isdisjoint(each.modules())]
        names = {name for module in modules for name in module.parameters}
        self._slots = [
            (part._parameters, key, weight)
            for path, part in model.named_modules(remove_duplicate=False)
            for key, weight in part.named_parameters(recurse=False)
            if part in inside or f"{path}.{key}".removeprefix(".") in names
        ]
        weights: list[Tensor] = [weight for *_, weight in self._slots]
        weights += [entry for root in self.roots.values() for entry in root.buffers()]
        self.device = next((weight.device for weight in weights), torch.device("cpu"))
        self.kinds: dict[Hashable, Kind] = {}  # of calls that were recorded, by `signature`
        odd = {type(w).__name__ for w in weights if type(w) not in (Tensor, nn.Parameter)}
        require(not odd, f"weights of the frozen layers are a tensor subclass ({', '.join(odd)})")
        self._versions, self._sums = -1, list[int]()
        self.check()

    def check(self) -> bool:
        """Return whether no frozen parameter is replaced by another one for now.

        Buffers do not count, since DistributedDataParallel copies them in every pass.

        Raises:
            UncacheableError: a frozen parameter trains or was written to, or there is a hook.
        """
        require(not any(weight.requires_grad for *_, weight in self._slots), TRAINED)
        hooks = [*self.model._forward_pre_hooks.values()]
        for module in self._watched:
            hooks += (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        others = (getattr(hook, "__module__", "") for hook in hooks if not is_ours(hook))
        # Hooks that compute weights are fine.
        require(all(name.startswith("torch.nn.utils.") for name in others), HOOKED)
        if any(table.get(key) is not weight for table, key, weight in self._slots):
            return False
        versions = sum(int(weight._version) for *_, weight in self._slots)
        if versions != self._versions:
            sums = [tree.sum_bytes(weight) for *_, weight in self._slots]
            require(self._sums in ([], sums), "a weight of the frozen layers was changed")
            self._versions, self._sums = versions, sums
        return True

    def record(self) -> Record:
        """Return a record of all that the roots give from now on, up to `close`."""
        record = Record(self.tap)
        for name, root in self.roots.items():
            root.register_forward_hook(Hook(self, partial(record.note, name=name)))
        return record

    def close(self) -> None:
        """Remove the hooks; can be called again after an interrupt."""
        for root in self.roots.values():
            remove(root._forward_hooks, self)

    def learn(self, batch: Batch, record: Record) -> tuple[Kind, Tensor]:
        """Return and remember the kind of call that a recorded pass was, and what crossed.

        Raises:
            UncacheableError: the frozen layers did not run as in the proof.
        """
        require(not record.refusal, record.refusal)
        once = {name for name, count in record.calls.items() if count == 1}
        if self.tap not in once or (value := record.value) is None:
            raise UncacheableError(
                f"{self.tap} is called {record.calls[self.tap]} times in a forward pass, or gives "
                "no tensor"
            )
        tables = {name for name, root in self.roots.items() if isinstance(root, nn.Embedding)}
        blanks = {name: record.blanks[name] for name in once - tables | {self.tap}}
        kind = Kind(blanks=blanks, crossing=torch.empty_like(value, device="meta"))
        known = next(iter(self.kinds.values()), kind)
        differing = next(iter(blanks.keys() ^ known.blanks.keys()), "")
        require(not differing, f"{differing} does not run in each forward pass")
        return self.kinds.setdefault(signature(batch), kind), value

    @contextmanager
    def replaying(self, kind: Kind, value: Tensor) -> Iterator[None]:
        """Skip the frozen layers in the forward pass of the block, which is given `value`.

        Raises:
            UncacheableError: after the block: one was not called once.
        """
        calls, left = Counter[str](), [value]

        def answer(name: str, *_: Any, **__: Any) -> Any:
            calls[name] += 1

            def fill(blank: Tensor) -> Tensor:
                # A copy, since the model may write into it.
                is_activation = blank.is_floating_point() and blank.dim() > 1
                return left.pop() if name == self.tap and left and is_activation else blank.clone()

            return tree.map_tensors(fill, kind.blanks[name])

        tables = {name: vars(self.roots[name]) for name in kind.blanks}
        before = {name: table["forward"] for name, table in tables.items() if "forward" in table}
        try:
            for name, table in tables.items():
                table["forward"] = partial(answer, name)
            yield
        finally:
            for name, table in tables.items():
                table.pop("forward", None)
                if name in before:
                    table["forward"] = before[name]
        odd = next((name for name in kind.blanks if calls[name] != 1), "")
        require(not odd, f"{odd} was called {calls[odd]} times in a pass that skips it")


def require(condition: bool, reason: str) -> None:
    """Raise UncacheableError with the reason unless a condition holds."""
    if not condition:
        raise UncacheableError(reason)


def signature(batch: Batch) -> Hashable:
    """Return a value that is equal for calls of equal shapes, types and plain values."""
    told: list[Hashable] = [
        (name, e.shape, e.dtype, e.device) if isinstance(e, Tensor) else (name, repr(e))
        for name, e in batch.contents
    ]
    return (batch.autocast, *told)


def has_nan(output: Any) -> bool:
    """Return whether there is a NaN in an output, also within objects."""
    found = (entry for entry in tree.tensors(output) if entry.is_floating_point())
    return any(bool(entry.detach().sum().isnan()) for entry in found)


def _blank(tensor: Tensor) -> Tensor:
    """Return NaN, or an integer not all elements have, in the shape of a tensor; no memory."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    value = torch.nan if is_number else int(not tensor.any())
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
