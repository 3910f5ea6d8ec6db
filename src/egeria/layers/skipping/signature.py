"""The arguments of one call: which calls run alike, and where their samples lie."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from egeria import tree
from egeria.errors import UncacheableError
from egeria.layers.batch import Batch


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


def copied(batch: Batch) -> Batch:
    """Return a copy of a batch, detached: a model may overwrite its arguments."""
    return batch.first_rows(None)


def lengths_of(batch: Batch, num_rows: int) -> list[int] | None:
    """Return the true length of each row, from a right-padded `attention_mask` [B, T]; None without one."""
    mask = batch.kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != num_rows:
        return None
    present = mask.detach().bool().cpu()
    lengths = present.sum(dim=1)
    is_right_padded = bool((present[:, 1:] <= present[:, :-1]).all()) and bool((lengths > 0).all())
    return [int(length) for length in lengths] if is_right_padded else None


def _arguments(batch: Batch) -> tuple[Any, Any]:
    return batch.args, dict(batch.kwargs)


def _named(batch: Batch) -> Iterable[tuple[str, Tensor]]:
    return tree.named_leaves(_arguments(batch))
