"""The samples of a batch: which arguments have a row for each, and whether what crosses has one
too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria import tree
from egeria.errors import UncacheableError
from egeria.model.batch import OF_THE_LOSS, Batch
from egeria.skipping.crossing import Crossing, require
from egeria.skipping.probe import Trial, is_close
from egeria.skipping.replay import Place

NUM_SEEDS = 3
"""Trial runs with other random numbers."""
NUM_SEEDS_DRAWN = 24
"""The same where random numbers are drawn in front of the boundary: layers may be skipped now and
then."""

DIGEST_BYTES = 16

Axes = Mapping[Place, int | None]
"""The batch axis of each tensor that crosses; None for what is the same for every sample."""


def signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Return a value that is equal for calls that run alike.

    It holds shape, dtype, device and need for a gradient of every tensor, every plain value, also
    those in objects, and the type of anything else; not what the tensors hold.
    """
    return _describe(args), tuple((key, _describe(kwargs[key])) for key in sorted(kwargs))


def _describe(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device, value.requires_grad
    if isinstance(value, Mapping):
        return type(value).__qualname__, tuple(
            (key, _describe(entry)) for key, entry in value.items()
        )
    if isinstance(value, (tuple, list)):
        return type(value).__qualname__, tuple(_describe(entry) for entry in value)
    plain = (
        (name, repr(entry)) for name, entry in tree.contents(value) if not isinstance(entry, Tensor)
    )
    return type(value).__qualname__, *plain


def bytes_of(tensor: Tensor, num_rows: int = 1) -> Any:
    """Return the memory of a tensor as an array of bytes [num_rows, ...]; on an accelerator this
    waits for it.
    """
    if tensor.numel() == 0:
        return np.zeros((num_rows, 0), dtype=np.uint8)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(num_rows, -1).view(torch.uint8).numpy()


@dataclass(frozen=True, kw_only=True, slots=True)
class RowArguments:
    """Which arguments have one row per sample; all others are shared by the batch, such as a [T, T]
    mask.
    """

    names: tuple[str, ...]
    """Ways to the tensors, as `tree.named_leaves` gives them; never empty."""
    shared: tuple[str, ...]
    """Ways to the tensors that are shared, however long their first axis may be in another
    batch."""

    @classmethod
    def find(cls, batch: Batch, num_rows: int) -> RowArguments:
        """Return the tensors whose first axis is as long as the batch; all must be in plain sight,
        and one be there.
        """
        named = list(tree.named_leaves(batch.arguments))
        require(
            len(named)
            == sum(isinstance(value, Tensor) for _, value in tree.contents(batch.arguments)),
            "an argument of the model is an object with tensors inside, and what is in it cannot "
            "be told apart by "
            "sample; pass tensors, tuples, lists or dictionaries",
        )
        names = tuple(
            name for name, tensor in named if tensor.dim() and tensor.shape[0] == num_rows
        )
        require(
            bool(names), f"no argument of the model has one row for each of the {num_rows} samples"
        )
        return cls(names=names, shared=tuple(name for name, _ in named if name not in names))

    def count(self, batch: Batch) -> int:
        """Return how many samples a batch has."""
        for name, tensor in tree.named_leaves(batch.arguments):
            if name in self.names and tensor.dim():
                return tensor.shape[0]
        raise UncacheableError(
            "the model is called in a new way, without any argument that it had at first"
        )

    def digest_of_shared(self, batch: Batch) -> bytes:
        """Return a digest of what the shared tensors of a batch hold, but for
        what is of the loss.
        """
        num_rows, digest = self.count(batch), hashlib.blake2b(digest_size=DIGEST_BYTES)
        for name, tensor in sorted(tree.named_leaves(batch.arguments), key=itemgetter(0)):
            if OF_THE_LOSS not in name and not self._has_rows(name, tensor, num_rows):
                digest.update(name.encode())
                digest.update(bytes_of(tensor).data)
        return digest.digest()

    def _has_rows(self, name: str, tensor: Tensor, num_rows: int) -> bool:
        return name not in self.shared and tensor.dim() > 0 and tensor.shape[0] == num_rows

    def take(self, batch: Batch, rows: Tensor, length: int | None = None) -> Batch:
        """Return a copy of a batch with the given rows [b], detached; repeats are fine.

        With a length, row arguments as long as the attention mask are cut to it.
        """
        num_rows = self.count(batch)
        mask = batch.kwargs.get("attention_mask")
        full = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() > 1 else None
        names = iter([name for name, _ in tree.named_leaves(batch.arguments)])

        def cut(tensor: Tensor) -> Tensor:
            if not self._has_rows(next(names), tensor, num_rows):
                return tensor.detach().clone()
            picked = tensor.detach().index_select(0, rows.to(tensor.device))
            is_long = tensor.dim() > 1 and tensor.shape[1] == full
            return (
                picked.narrow(1, 0, length).contiguous()
                if is_long and length is not None
                else picked
            )

        args, kwargs = tree.map_tensors(cut, batch.arguments)
        return replace(batch, args=args, kwargs=kwargs)

    def rolled(self, batch: Batch) -> Batch:
        """Return a batch alike with other values: the same samples, each in the
        place of the next.
        """
        return self.take(batch, torch.arange(self.count(batch)).roll(1))


@torch.no_grad()
def true_lengths(kwargs: Mapping[str, Any], num_rows: int) -> np.ndarray | None:
    """Return the length of each row without its padding, as int64 [B], from the argument
    `attention_mask`.

    None unless that is a mask [B, T] of integers or booleans, zero or one, padded on the right in
    every row, with at least one true element in each: only then can rows be cut. On an accelerator
    this waits for it.
    """
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != num_rows:
        return None
    if mask.is_floating_point() or mask.is_complex() or mask.numel() == 0:
        return None
    lengths = (mask != 0).sum(1)
    expected = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    regular = (mask == expected).all() & (lengths > 0).all()
    regular_then_lengths = torch.cat([regular[None].long(), lengths]).cpu().numpy()
    return regular_then_lengths[1:] if regular_then_lengths[0] else None


def check_function(crossing: Crossing, other: Batch) -> None:
    """Make sure that what crosses depends on neither random numbers nor earlier calls, such as one
    with `other`.
    """
    probe, values = crossing.probe, crossing.values

    def agrees(trial: Trial) -> bool:
        found = {place: trial.value(place) for place in values}
        return all(
            own is not None and is_close(own, values[place], crossing.limit)
            for place, own in found.items()
        )

    seed, last = 0, NUM_SEEDS
    while seed < last:
        seed += 1
        with probe.session():
            trial = probe.outputs(crossing.batch, values, seed=seed)
        last = NUM_SEEDS_DRAWN if trial.drew else last
        if not agrees(trial):
            raise UncacheableError(
                f"what the frozen layers give is random: {_name_randomness(crossing)}"
            )
    with probe.session():
        probe.outputs(other, (), seed=0)
        trial = probe.outputs(crossing.batch, values, seed=0)
    require(
        agrees(trial),
        "what the frozen layers give depends on the calls before: the model carries state from "
        "batch to batch",
    )


def _name_randomness(crossing: Crossing) -> str:
    for name in crossing.probe.active_in_front(crossing.batch, crossing.values):
        return (
            f"{name} is in training mode and runs in front of the boundary, since active "
            "layers use it too"
        )
    return (
        "noise, functional dropout or layers skipped at random stand in front of the boundary, in "
        "code that is "
        "in training mode as long as anything behind it is"
    )


def find_axes(crossing: Crossing, arguments: RowArguments) -> tuple[dict[Place, int | None], bool]:
    """Return the batch axis of each tensor, and whether the frozen layers run on some of the rows
    too.

    No row may depend on the other samples of its batch.
    """
    num_rows = arguments.count(crossing.batch)
    some = torch.arange(num_rows - 1, -1, -2)
    trial = _run_rows(crossing, arguments, some)
    can_split = trial.error is None
    if not can_split:
        some = some.repeat(2)[:num_rows]
        trial = _run_rows(crossing, arguments, some)
        require(
            trial.error is None, f"the frozen layers fail on some rows of a batch ({trial.error})"
        )
    axes: dict[Place, int | None] = {}
    for place, whole in crossing.values.items():
        part = trial.value(place)
        if part is not None and is_close(part, whole, crossing.limit):
            axes[place] = None
            continue
        candidates = _axes_of_rows(place[0], whole, part, num_rows, len(some))
        own = {axis: whole.index_select(axis, some.to(whole.device)) for axis in candidates}
        fitting = [
            axis for axis in own if part is not None and is_close(part, own[axis], crossing.limit)
        ]
        require(
            bool(fitting),
            f"what {place[0]} gives for a sample depends on the other samples of its batch",
        )
        axes[place] = fitting[0]
    _check_constants(
        crossing, arguments, [place for place, axis in axes.items() if axis is None], num_rows
    )
    return axes, can_split


def _check_constants(
    crossing: Crossing, arguments: RowArguments, constants: Sequence[Place], num_rows: int
) -> None:
    """Make sure that what some rows give as the whole batch does is no statistic of them, such as
    the largest value.
    """
    if not constants:
        return
    trial = _run_rows(crossing, arguments, torch.arange(num_rows - 2, -1, -2).repeat(2)[:num_rows])
    for place in constants:
        part = trial.value(place)
        is_same = part is not None and is_close(part, crossing.values[place], crossing.limit)
        require(
            is_same,
            f"what {place[0]} gives for all samples alike depends on which samples a batch has",
        )


def _run_rows(
    crossing: Crossing, arguments: RowArguments, rows: Tensor, length: int | None = None
) -> Trial:
    part = arguments.take(crossing.batch, rows, length)
    with crossing.probe.session():
        return crossing.probe.outputs(part, crossing.values, seed=0)


def _axes_of_rows(
    root: str, whole: Tensor, part: Tensor | None, num_rows: int, num_some: int
) -> list[int]:
    """Return the axes that may follow the samples: the one that shrinks with them, or all of their
    length.
    """
    if num_some == num_rows:  # the frozen layers run on whole batches alone
        axes = [axis for axis, size in enumerate(whole.shape) if size == num_rows]
        require(
            bool(axes),
            f"what {root} gives has no axis with one row per sample: {tuple(whole.shape)}",
        )
        return axes
    same_dim = part is not None and part.dim() == whole.dim()
    sizes = list(zip(whole.shape, part.shape, strict=True)) if part is not None and same_dim else []
    changed = [axis for axis, (before, after) in enumerate(sizes) if before != after]
    require(
        len(changed) == 1 and sizes[changed[0]] == (num_rows, num_some),
        f"what {root} gives has no axis with one row per sample: {tuple(whole.shape)} for "
        f"{num_rows} samples, "
        f"{None if part is None else tuple(part.shape)} for {num_some}",
    )
    return changed


def cuttable_axes(
    crossing: Crossing, arguments: RowArguments, axes: Axes
) -> dict[Place, int] | None:
    """Return the axes of rows along which padding may be cut: all that the model gives is the same
    without it.

    Empty where no row follows the length, and is the same at another one; None where nothing of it
    is proven.
    """
    lengths = true_lengths(crossing.batch.kwargs, arguments.count(crossing.batch))
    found = None if lengths is None else _length_axes(crossing, arguments, axes, lengths.tolist())
    if lengths is None or not found:
        return found
    padded = dict(crossing.values)
    for place, length_axis in found.items():
        axis = axes[place] or 0
        padded[place] = cut_padding(
            padded[place].movedim(axis, 0), length_axis, lengths.tolist()
        ).movedim(0, axis)
    return None if crossing.differs(padded) else found


def _length_axes(
    crossing: Crossing, arguments: RowArguments, axes: Axes, lengths: Sequence[int]
) -> dict[Place, int] | None:
    """Return the axis of each row that follows the length of the sequence; None where padding must
    not be cut.

    Runs the shortest rows of the batch with their padding cut.
    """
    full = crossing.batch.kwargs["attention_mask"].shape[1]
    short = max((length for length in lengths if length < full), default=0)
    chosen = [row for row, length in enumerate(lengths) if length <= short]
    if not chosen:
        return None
    index = torch.tensor(chosen)
    trial = _run_rows(crossing, arguments, index, short)
    found: dict[Place, int] = {}
    for place, axis in axes.items():
        if axis is None:
            continue
        value = crossing.values[place]
        whole = value.index_select(axis, index.to(value.device)).movedim(axis, 0)
        part = trial.value(place)
        if part is None or part.dim() != whole.dim():
            return None
        part = part.movedim(axis, 0)
        changed = [d for d in range(part.dim()) if part.shape[d] != whole.shape[d]]
        if len(changed) > 1 or any(
            d == 0 or (whole.shape[d], part.shape[d]) != (full, short) for d in changed
        ):
            return None
        length_axis = changed[0] - 1 if changed else None
        rows = zip(part, whole, (lengths[row] for row in chosen), strict=True)
        if not all(
            is_close(_start(a, length_axis, n), _start(b, length_axis, n), crossing.limit)
            for a, b, n in rows
        ):
            return None
        if length_axis is not None:
            found[place] = length_axis
    return found


def _start(row: Tensor, length_axis: int | None, length: int) -> Tensor:
    return row if length_axis is None else row.narrow(length_axis, 0, length)


def cut_padding(rows: Tensor, length_axis: int, lengths: Sequence[int]) -> Tensor:
    """Return rows [B, ...] with zeros in the place of their padding: what a store gives back."""
    padded = torch.zeros_like(rows)
    for row, length in enumerate(lengths):
        padded[row].narrow(length_axis, 0, length).copy_(rows[row].narrow(length_axis, 0, length))
    return padded
