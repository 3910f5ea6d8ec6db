"""What forward passes from memory and from the disk have in common: checks, and what was used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from egeria.cache.forward_modes import PaybackCheck, PlainForward, Rollback, StaleError, UserForward
from egeria.cache.store.codec import Integers, Mask
from egeria.events import CacheUsed
from egeria.model.batch import Batch
from egeria.skipping.crossing import check_runs_once
from egeria.skipping.prefix import Prefix
from egeria.skipping.probe import tolerance

LEAST_ROWS = 16
"""Rows that are computed together at least: a matrix product of very few rows takes another way, to
other last bits."""
SERVED_SHARE = 0.9
"""Share of the samples of a batch that must be known, or its time says nothing of what serving
brings."""
NUM_COMPARED = 3
"""Frozen weights that are compared by value before every forward."""

Entry = tuple[Mapping[str, Tensor | None], str]
"""A table of a module, and the name of a parameter or buffer in it."""


class FrozenTensors:
    """Detects whether tensors were assigned, written to, or set to train.

    What writes through `data` (averages of weights, Lookahead) leaves no trace but the values, and
    mostly concerns all weights: so the smallest, `num_compared` in number, are compared by value.
    """

    def __init__(self, entries: Iterable[Entry], *, num_compared: int = NUM_COMPARED) -> None:
        self._found = [
            (table, name, _version(table[name]))
            for table, name in entries
            if name != "num_batches_tracked"
        ]
        tensors = (table[name] for table, name, _ in self._found)
        weights = sorted(
            (tensor for tensor in tensors if isinstance(tensor, nn.Parameter)), key=Tensor.numel
        )
        self._compared = [(weight, weight.detach().clone()) for weight in weights[:num_compared]]

    @property
    def have_changed(self) -> bool:
        """Whether one is not what it was."""
        if any(_version(table.get(name)) != version for table, name, version in self._found):
            return True
        return not all(torch.equal(weight, before) for weight, before in self._compared)


def _version(tensor: Tensor | None) -> tuple[int, int, int, bool]:
    """Return what changes with every assignment, with every change in place that torch knows of,
    and with a thaw.
    """
    if tensor is None:
        return 0, 0, 0, False
    return id(tensor), tensor._version, tensor.data_ptr(), tensor.requires_grad


@dataclass(slots=True)
class Use:
    """What a generation did so far; samples, but for the batches."""

    hits: int = 0
    misses: int = 0
    mismatches: int = 0
    batches: int = 0
    stalls: int = 0
    checks: int = 0
    largest_error: float = 0.0


@dataclass(kw_only=True, eq=False)
class StoredForward(PlainForward):
    """Serves training forwards from a store, and fills it."""

    prefix: Prefix
    """The frozen front."""
    boundary: str
    """Name of the last frozen layer module."""
    number: int
    """Of the generation."""
    verify_batches: int
    """Batches from the store between two checks."""
    payback: PaybackCheck

    def __post_init__(self) -> None:
        self.use = Use()
        self.rollback = Rollback(self.prefix.model)
        self._device = next(self.prefix.model.parameters()).device
        self._weights = FrozenTensors(self.prefix.weights())
        self._failure: Exception | None = None
        """Of a recorded forward, which was done and right; the next one is not recorded."""
        self._until_check = 0

    def used(self, step: int, **own: Any) -> CacheUsed:
        """Return what it did so far, for the journal."""
        return CacheUsed(
            step=step, boundary=self.boundary, generation=self.number, **asdict(self.use), **own
        )

    def _check(self) -> None:
        """Raise what has failed since the last forward, or a `StaleError` where something about the
        frozen front has changed.
        """
        if self._failure is not None:
            raise self._failure
        check_runs_once()
        if self._weights.have_changed:
            raise StaleError("the weights of the frozen layers were changed, or train again")
        if self.prefix.is_set_otherwise():
            raise StaleError("an attribute of a frozen layer was set to another value")
        if self.prefix.is_hooked():
            raise StaleError(
                "a forward hook was put on a frozen layer, and would not be called where that is "
                "skipped"
            )

    def _replay(self, call: UserForward, batch: Batch, rows: Sequence[Tensor], known: Mask) -> Any:
        """Make the forward with these rows [B, ...], of which some were known [B]."""
        self.use.hits += int(known.sum())
        self.use.misses += int((~known).sum())
        self.rollback.save()
        output = call.replayed(self.prefix.replaying(rows, batch))
        self.rollback.forget()
        return output

    def _check_rows(
        self,
        batch: Batch,
        computed: Sequence[Tensor],
        rows: Sequence[Tensor],
        known: Mask,
        lengths: Integers | None,
    ) -> None:
        """Compare the rows [B, ...] that the store had with computed ones."""
        self._until_check, some = self.verify_batches, np.flatnonzero(known)
        own, stored = (take_rows(side, some) for side in (computed, rows))
        error = self.prefix.error(own, stored, None if lengths is None else lengths[some].tolist())
        self.use.checks += 1
        self.use.largest_error = max(self.use.largest_error, error)
        limit = tolerance(batch, self._device)
        if not error <= limit:
            raise StaleError(
                f"stored activations differ from computed ones by {error:.1e}, more than "
                f"{limit:.1e}"
            )


def take_rows(leaves: Sequence[Tensor], rows: Integers) -> list[Tensor]:
    """Return copies of some rows [b] of each tensor [B, ...]."""
    return [leaf[torch.from_numpy(rows).to(leaf.device)] for leaf in leaves]
