"""The samples of a batch: which arguments have a row for each, and whether what crosses has one too."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria import tree
from egeria.errors import UncacheableError
from egeria.layers.batch import Batch
from egeria.skipping.crossing import require
from egeria.skipping.probe import Probe, Trial, is_close
from egeria.skipping.replay import Place


def signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Return a value that is equal for calls that run alike.

    It holds shape, dtype, device and need for a gradient of every tensor, every plain value, and the type of
    anything else; not what the tensors hold.
    """
    return _describe(args), tuple((key, _describe(kwargs[key])) for key in sorted(kwargs))


def _describe(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device, value.requires_grad
    if isinstance(value, Mapping):
        return type(value).__qualname__, tuple((key, _describe(entry)) for key, entry in value.items())
    if isinstance(value, (tuple, list)):
        return type(value).__qualname__, tuple(_describe(entry) for entry in value)
    return type(value).__qualname__, repr(value) if tree.is_plain(value) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowArguments:
    """Which arguments have one row per sample; all others are shared by the batch, such as a [T, T] mask."""

    names: tuple[str, ...]
    """Ways to the tensors, as `tree.named_leaves` gives them; never empty."""
    shared: tuple[str, ...]
    """Ways to the tensors that are shared, however long their first axis may be in another batch."""

    @classmethod
    def find(cls, batch: Batch, num_rows: int) -> RowArguments:
        """Return the tensors whose first axis is as long as the batch.

        Raises:
            UncacheableError: there is none, or tensors travel in objects that cannot be looked into.
        """
        named = list(_named(batch))
        hidden = sum(isinstance(value, Tensor) for _, value in tree.contents(_arguments(batch))) - len(named)
        if hidden:
            raise UncacheableError(
                "an argument of the model is an object with tensors inside, and what is in it cannot be told apart "
                "by sample; pass tensors, tuples, lists or dictionaries"
            )
        names = tuple(name for name, tensor in named if tensor.dim() and tensor.shape[0] == num_rows)
        if not names:
            raise UncacheableError(f"no argument of the model has one row for each of the {num_rows} samples")
        return cls(names=names, shared=tuple(name for name, _ in named if name not in names))

    def count(self, batch: Batch) -> int:
        """Return how many samples a batch has.

        Raises:
            UncacheableError: none of the arguments that tell is there.
        """
        own = set(self.names)
        for name, tensor in _named(batch):
            if name in own and tensor.dim():
                return tensor.shape[0]
        raise UncacheableError("the model is called in a new way, without any argument that it had at first")

    def take(self, batch: Batch, rows: Tensor, length: int | None = None) -> Batch:
        """Return a copy of a batch with the given rows, detached.

        Args:
            batch: arguments with one row per sample.
            rows: numbers of the rows [b], in the order wanted; repeats are fine.
            length: if given, row arguments as long as the attention mask are cut to it.
        """
        num_rows = self.count(batch)
        mask = batch.kwargs.get("attention_mask")
        full = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() > 1 else None
        names = iter([name for name, _ in _named(batch)])

        def cut(tensor: Tensor) -> Tensor:
            if next(names) in self.shared or not tensor.dim() or tensor.shape[0] != num_rows:
                return tensor.detach().clone()
            picked = tensor.detach().index_select(0, rows.to(tensor.device))
            is_long = length is not None and tensor.dim() > 1 and tensor.shape[1] == full
            return picked.narrow(1, 0, length).contiguous() if is_long and length is not None else picked

        args, kwargs = tree.map_tensors(cut, _arguments(batch))
        return replace(batch, args=args, kwargs=kwargs)


@torch.no_grad()
def true_lengths(kwargs: Mapping[str, Any], num_rows: int) -> np.ndarray | None:
    """Return the length of each row without its padding, as int64 [B], from the argument `attention_mask`.

    None unless that is a mask [B, T] of integers or booleans, zero or one, padded on the right in every
    row, with at least one true element in each: only then can rows be cut. On an accelerator this waits for it.
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


def _arguments(batch: Batch) -> tuple[Any, Any]:
    return batch.args, dict(batch.kwargs)


def _named(batch: Batch) -> Iterable[tuple[str, Tensor]]:
    return tree.named_leaves(_arguments(batch))


NUM_SEEDS = 3
"""Trial runs with other random numbers."""
NUM_SEEDS_DRAWN = 24
"""The same where random numbers are drawn in front of the boundary: layers may be skipped now and then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowProbe:
    """Compares what crosses in one batch with what crosses in others."""

    probe: Probe
    batch: Batch
    num_rows: int
    arguments: RowArguments
    values: Mapping[Place, Tensor]
    """What crosses in the batch."""
    limit: float

    @property
    def places(self) -> tuple[Place, ...]:
        """Where it crosses."""
        return tuple(self.values)

    def check_function(self, other: Batch) -> None:
        """Make sure that it depends on neither random numbers nor earlier calls.

        Args:
            other: a batch alike with other values.

        Raises:
            UncacheableError: it does.
        """
        seed, last = 0, NUM_SEEDS
        while seed < last:
            seed += 1
            with self.probe.session():
                trial = self.probe.outputs(self.batch, self.places, seed=seed)
            last = NUM_SEEDS_DRAWN if trial.drew else last
            if not self._agrees(trial):
                raise UncacheableError(f"what the frozen layers give is random: {self._name_randomness()}")
        with self.probe.session():
            self.probe.outputs(other, (), seed=0)
            trial = self.probe.outputs(self.batch, self.places, seed=0)
        require(
            self._agrees(trial),
            "what the frozen layers give depends on the calls before: the model carries state from batch to batch",
        )

    def _name_randomness(self) -> str:
        with self.probe.session():
            active = self.probe.active_in_front(self.batch, self.places)
        if active:
            return f"{active[0]} is in training mode and runs in front of the boundary, since active layers use it too"
        return (
            "noise, functional dropout or layers skipped at random stand in front of the boundary, in code that is "
            "in training mode as long as anything behind it is"
        )

    def find_axes(self) -> tuple[dict[Place, int | None], bool]:
        """Return the batch axis of each tensor, and whether the frozen layers run on some of the rows too.

        Raises:
            UncacheableError: a row depends on others, or is no row.
        """
        some = torch.arange(self.num_rows - 1, -1, -2)
        trial = self._run(some)
        if trial.error is None:
            return {place: self._axis_by_size(place, trial, some) for place in self.places}, True
        repeated = some.repeat(2)[: self.num_rows]
        trial = self._run(repeated)
        require(trial.error is None, f"the frozen layers fail on some rows of a batch ({trial.error})")
        return {place: self._axis_by_values(place, trial, repeated) for place in self.places}, False

    def _run(self, rows: Tensor) -> Trial:
        part = self.arguments.take(self.batch, rows)
        with self.probe.session():
            return self.probe.outputs(part, self.places, seed=0)

    def _axis_by_size(self, place: Place, trial: Trial, rows: Tensor) -> int | None:
        """Find the axis that shrinks with the number of rows."""
        whole, part = self.values[place], _value(trial, place)
        sizes = [] if part is None or part.dim() != whole.dim() else list(zip(whole.shape, part.shape, strict=True))
        changed = [axis for axis, (before, after) in enumerate(sizes) if before != after]
        if part is not None and part.shape == whole.shape and is_close(part, whole, self.limit):
            return None
        require(
            len(changed) == 1 and sizes[changed[0]] == (self.num_rows, len(rows)),
            f"what {place[0]} gives has no axis with one row per sample: {tuple(whole.shape)} for {self.num_rows} "
            f"samples, {None if part is None else tuple(part.shape)} for {len(rows)}",
        )
        self._require_own(place, part, changed[0], rows)
        return changed[0]

    def _axis_by_values(self, place: Place, trial: Trial, rows: Tensor) -> int | None:
        """Find the axis that follows the samples where their number cannot change."""
        whole, moved = self.values[place], _value(trial, place)
        if moved is not None and is_close(moved, whole, self.limit):
            return None
        axes = [axis for axis, size in enumerate(whole.shape) if size == self.num_rows]
        require(bool(axes), f"what {place[0]} gives has no axis with one row per sample: {tuple(whole.shape)}")
        fitting = [axis for axis in axes if self._are_own(place, moved, axis, rows)]
        self._require_own(place, moved, (fitting or axes)[0], rows)
        return fitting[0]

    def _are_own(self, place: Place, part: Tensor | None, axis: int, rows: Tensor) -> bool:
        whole = self.values[place].index_select(axis, rows.to(self.values[place].device))
        return part is not None and is_close(part, whole, self.limit)

    def _require_own(self, place: Place, part: Tensor | None, axis: int, rows: Tensor) -> None:
        require(
            self._are_own(place, part, axis, rows),
            f"what {place[0]} gives for a sample depends on the other samples of its batch",
        )

    def _agrees(self, trial: Trial) -> bool:
        found = {place: _value(trial, place) for place in self.places}
        return all(got is not None and is_close(got, self.values[place], self.limit) for place, got in found.items())


def cuttable_axes(
    rows: RowProbe, axes: Mapping[Place, int | None], differs: Callable[[Mapping[Place, Tensor]], str]
) -> dict[Place, int]:
    """Return the axes of rows along which padding may be cut: all that the model gives is the same without it.

    Args:
        rows: the batch.
        axes: batch axis of each tensor.
        differs: replays the batch with some values, and returns the name of what differs.
    """
    found_lengths = true_lengths(rows.batch.kwargs, rows.num_rows)
    if found_lengths is None:
        return {}
    lengths = found_lengths.tolist()
    found = find_length_axes(rows, axes, lengths, rows.batch.kwargs["attention_mask"].shape[1])
    if not found:
        return {}
    padded = dict(rows.values)
    for place, length_axis in found.items():
        axis = axes[place] or 0
        padded[place] = cut_padding(padded[place].movedim(axis, 0), length_axis, lengths).movedim(0, axis)
    return {} if differs(padded) else found


def find_length_axes(
    rows: RowProbe, axes: Mapping[Place, int | None], lengths: Sequence[int], full: int
) -> dict[Place, int] | None:
    """Return the axis of each row that follows the length of the sequence, where there is one.

    Runs the shortest rows of the batch with their padding cut.

    Args:
        rows: the batch.
        axes: batch axis of each tensor.
        lengths: true length of each row.
        full: length that all are padded to.

    Returns:
        Axes of a row, the batch axis removed; None where padding must not be cut.
    """
    short = max((length for length in lengths if length < full), default=0)
    chosen = [row for row, length in enumerate(lengths) if length <= short]
    if not chosen:
        return None
    index = torch.tensor(chosen)
    with rows.probe.session():
        cut = rows.probe.outputs(rows.arguments.take(rows.batch, index, short), rows.places, seed=0)
    found: dict[Place, int] = {}
    for place, axis in axes.items():
        if axis is None:
            continue
        part = _value(cut, place)
        whole = rows.values[place].index_select(axis, index.to(rows.values[place].device)).movedim(axis, 0)
        if part is None or part.dim() != whole.dim():
            return None
        part = part.movedim(axis, 0)
        changed = [d for d in range(1, part.dim()) if part.shape[d] != whole.shape[d]]
        fits = [(whole.shape[d], part.shape[d]) == (full, short) for d in changed]
        if part.shape[0] != whole.shape[0] or len(changed) > 1 or not all(fits):
            return None
        own = [lengths[row] for row in chosen]
        if not all(_same_start(part[i], whole[i], changed, own[i], rows.limit) for i in range(len(chosen))):
            return None
        found.update({place: changed[0] - 1} if changed else {})
    return found


def cut_padding(rows: Tensor, length_axis: int, lengths: Sequence[int]) -> Tensor:
    """Return rows [B, ...] with zeros in the place of their padding: what a store gives back."""
    padded = torch.zeros_like(rows)
    for row, length in enumerate(lengths):
        padded[row].narrow(length_axis, 0, length).copy_(rows[row].narrow(length_axis, 0, length))
    return padded


def _same_start(part: Tensor, whole: Tensor, changed: Sequence[int], length: int, limit: float) -> bool:
    for axis in changed:
        part, whole = part.narrow(axis - 1, 0, length), whole.narrow(axis - 1, 0, length)
    return is_close(part, whole, limit)


def _value(trial: Trial, place: Place) -> Tensor | None:
    """Return a tensor that a pass gave; None where it did not run so far, or not once."""
    root, index = place
    own = trial.seen.outputs.get(root, [])
    return own[index] if trial.error is None and trial.seen.calls.get(root) == 1 and index < len(own) else None
