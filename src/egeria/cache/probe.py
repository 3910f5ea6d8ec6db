"""The one probe of a boundary: passes of our own that prove that the front can be left out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.cache.boundary import Boundary, Kind, Layout, Record, require
from egeria.cache.rows import count_rows, is_cut, take, true_lengths, true_positions
from egeria.errors import UncacheableError, brief
from egeria.model.batch import Batch
from egeria.model.undisturbed import capture, undisturbed
from egeria.random_state import random_fingerprint, seed_random_state

TOLERANCE = 1e-4
"""Relative difference that counts as rounding in float32 (law 3)."""


def prove(boundary: Boundary, batch: Batch) -> None:
    """Find out how what crosses is taken apart by sample, and that the rest needs nothing else.

    Makes about four passes of our own, which leave no trace. The boundary gets its layout, and its
    first kind of call.

    Raises:
        UncacheableError: the frozen layers cannot be left out; the message is the reason.
    """
    num_rows = count_rows(batch)
    require(num_rows > 1, "a batch of one sample does not show what belongs to a sample")
    _Probe(boundary, batch).run(num_rows)


class _Probe:
    def __init__(self, boundary: Boundary, batch: Batch) -> None:
        self._boundary, self._model, self._batch = boundary, boundary.model, batch
        self._limit = TOLERANCE

    def run(self, num_rows: int) -> None:
        boundary, record = self._boundary, Record(self._boundary)
        try:
            computed = self._pass(record=record)
        except UncacheableError:
            raise
        except Exception as error:
            raise UncacheableError(f"the model cannot be run again ({brief(error)})") from error
        kind, value = boundary.learn(self._batch, record)
        self._limit = boundary.limit = tolerance(record)
        whole = self._find_layout(value, num_rows)
        lengths = true_lengths(self._batch)
        axis = self._find_length_axis(whole, value, lengths)
        layouts, kept = [whole], true_positions(self._batch)
        if axis is not None:
            contents = self._batch.contents
            names = [n for n, e in contents if isinstance(e, Tensor) and is_cut(e, self._batch)]
            layouts.insert(0, replace(whole, length_axis=axis, cut_names=frozenset(names)))
        differing = ""
        for boundary.layout in layouts:
            rows = boundary.layout.split(value, range(num_rows), lengths)
            given = boundary.layout.join(rows, kind, value.device)
            require(given is not None, f"what {boundary.tap} gives cannot be put together again")
            assert given is not None
            hidden = kept if boundary.ignores_padding and boundary.layout is not whole else None
            if not (differing := self._find_difference(kind, given, computed, hidden)):
                return
        boundary.layout = None
        advice = "; call the model with use_cache=False" if "key_values" in differing else ""
        raise UncacheableError(
            f"without the frozen layers {differing} differs, though what {boundary.tap} gives is "
            f"given back: the rest of the model reads more of them than that{advice}"
        )

    def _find_difference(
        self, kind: Kind, value: Tensor, computed: Mapping[str, Any], kept: Tensor | None
    ) -> str:
        """Return the name of the first thing that differs in a pass without the front, or ''; of
        the output for each position, where there are `kept` ones [B, T], in those alone.

        Roots that depend on no frozen output, such as a table of positions that later layers read
        too, run live where nothing else helps.
        """
        boundary, found = self._boundary, ""
        for boundary.is_written in (False, True):
            for _ in range(2):
                boundary.independent = set()
                try:
                    given = _cut(self._pass(kind, value.clone()), kept)
                    found = first_difference(given, _cut(computed, kept), self._limit)
                except Exception as error:
                    found = f"the pass fails ({brief(error)}), and nothing"
                independent, boundary.independent = boundary.independent, None
                if not found:
                    return ""
                if boundary.live or not (independent := (independent or set()) - {boundary.tap}):
                    break
                boundary.live = frozenset(independent)
            boundary.live = frozenset()
        return found

    def _pass(
        self,
        kind: Kind | None = None,
        value: Tensor | None = None,
        *,
        record: Record | None = None,
    ) -> dict[str, Any]:
        """Run the model, without its front where there is a `kind`, and return all that the pass
        gave and changed, by name.
        """
        model, own = self._model, self._batch.first_rows(None)  # a model may overwrite its input
        rest = [module for module in model.modules() if module not in self._boundary.inside]
        with undisturbed(model, gradients=True, keeps_modes=True):
            before = self._front_state()
            seed_random_state(model, 0)
            if record is not None:
                record.open()  # the hooks go with the end of the block
            with own.autocast.context():
                if kind is None or value is None:
                    output = model(*own.args, **own.kwargs)
                else:
                    with self._boundary.replaying(kind, value):
                        output = model(*own.args, **own.kwargs)
            after = self._front_state()
            changed = next((name for name in after if after[name] != before.get(name)), "")
            require(
                not changed,
                f"the frozen layers set {changed} in each forward pass, and whatever reads it "
                "would find an old value",
            )
            parts = {
                "output": output,
                "argument": own.arguments,
                "buffer": dict(model.named_buffers()),
                **{f"attribute {number}": _attributes(m) for number, m in enumerate(rest)},
            }
            outcome = {
                name: entry.detach().clone() if isinstance(entry, Tensor) else entry
                for part, content in parts.items()
                for name, entry in tree.contents(content, part)
            }
            outcome["random numbers"] = random_fingerprint(model)
        return outcome

    def _capture(self, batch: Batch) -> Tensor:
        """Return what crosses for other rows, with other random numbers."""
        with undisturbed(self._model, gradients=True, keeps_modes=True):
            seed_random_state(self._model, 1)
            found = capture(self._model, self._boundary.tap, batch)
        require(found is not None, f"{self._boundary.tap} is not called for some rows of a batch")
        assert found is not None
        return found

    def _find_layout(self, value: Tensor, num_rows: int) -> Layout:
        """Find the axis of samples by running half of them: no row may depend on others."""
        some, tap = list(range(num_rows - 1, -1, -2)), self._boundary.tap
        try:
            part = self._capture(take(self._batch, some))
        except Exception as error:
            reason = f"the frozen layers fail on some rows of a batch ({brief(error)})"
            raise UncacheableError(reason) from error
        axes = _changed(value, part)
        require(
            [(value.shape[axis], part.shape[axis]) for axis in axes] == [(num_rows, len(some))],
            f"what {tap} gives has no axis with one row for each sample: {tuple(value.shape)} for "
            f"{num_rows} samples, {tuple(part.shape)} for {len(some)}",
        )
        expected = value.index_select(axes[0], torch.tensor(some, device=value.device))
        require(
            is_close(part, expected, self._limit),
            f"what {tap} gives for a sample is random, or depends on the other samples of its "
            "batch or on earlier calls",
        )
        return Layout.of(value, axes[0])

    def _find_length_axis(
        self, layout: Layout, value: Tensor, lengths: Sequence[int] | None
    ) -> int | None:
        """Return the axis of a row that follows the length, by running the shorter rows of the
        batch with their padding cut; None where there is none.
        """
        if lengths is None:
            return None
        full = self._batch.kwargs["attention_mask"].shape[1]
        short = max((length for length in lengths if length < full), default=0)
        chosen = [row for row, length in enumerate(lengths) if length <= short]
        try:
            part = self._capture(take(self._batch, chosen, short))
        except Exception:  # whatever a model raises on sequences cut short
            return None
        pairs = list(
            zip(
                layout.split(part, range(len(chosen)), None),
                layout.split(value, chosen, None),
                strict=True,
            )
        )
        axes = _changed(pairs[0][1], pairs[0][0])
        if [(pairs[0][1].shape[axis], pairs[0][0].shape[axis]) for axis in axes] != [(full, short)]:
            return None
        axis, own = axes[0], [lengths[row] for row in chosen]
        agree = all(
            is_close(first.narrow(axis, 0, n), second.narrow(axis, 0, n), self._limit)
            for (first, second), n in zip(pairs, own, strict=True)
        )
        return axis if agree else None

    def _front_state(self) -> dict[str, Any]:
        """Return what tells whether a pass changed something in the front."""
        return {
            f"{name}.{key}": (
                id(value),
                value._version if isinstance(value, Tensor) else _size(value),
            )
            for name, root in self._boundary.roots.items()
            for part in root.modules()
            for table in (vars(part), part._buffers)
            for key, value in table.items()
            if "_hook" not in key and key not in ("forward", "training")
        }


def tolerance(record: Record) -> float:
    """Return the relative difference that the precision of a recorded pass allows."""
    autocast = record.autocast
    if autocast is not None and autocast.enabled:
        return max(TOLERANCE, 8 * torch.finfo(autocast.dtype).eps)
    uses_tf32 = (
        autocast is not None
        and autocast.device_type == "cuda"
        and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
    )
    return 8 * 2.0**-10 if uses_tf32 else TOLERANCE


def is_close(first: Tensor, second: Tensor, limit: float) -> bool:
    """Return whether two tensors are the same up to rounding, also that of their own dtype."""
    if second.is_floating_point():
        limit = max(limit, 8 * torch.finfo(second.dtype).eps)
    return first.dtype == second.dtype and difference(first, second) <= limit


def difference(first: Tensor, second: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest value of the second.

    Infinite where shapes differ, or one is not finite and the other is something else.
    """
    if first.shape != second.shape:
        return math.inf
    if torch.equal(first, second):
        return 0.0
    if not second.is_floating_point() and not second.is_complex():
        return math.inf
    wide = torch.complex128 if second.is_complex() else torch.float64
    own, other = first.detach().cpu().to(wide), second.detach().cpu().to(wide)
    is_odd = ~(own.isfinite() & other.isfinite())
    if not torch.equal(own[is_odd], other[is_odd]):
        return math.inf
    gap, size = (own - other)[~is_odd].abs(), other[~is_odd].abs()
    return float(gap.max() / size.max().clamp_min(1e-30)) if gap.numel() else 0.0


def first_difference(found: Mapping[str, Any], computed: Mapping[str, Any], limit: float) -> str:
    """Return the name of the first entry that is not the same up to rounding, or ''."""
    for name in [*computed, *(found.keys() - computed.keys())]:
        if name not in found or name not in computed:
            return name
        first, second = found[name], computed[name]
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            is_same = is_close(first, second, limit)
        else:
            is_same = type(first) is type(second) and bool(first == second)
        if not is_same:
            return name
    return ""


def _cut(outcome: Mapping[str, Any], kept: Tensor | None) -> dict[str, Any]:
    """Return what a pass gave, of the output for each position [B, T, ...] only the `kept` ones."""
    return {
        name: entry[kept.to(entry.device)]
        if kept is not None
        and isinstance(entry, Tensor)
        and name.startswith("output")
        and entry.shape[:2] == kept.shape
        else entry
        for name, entry in outcome.items()
    }


def _changed(first: Tensor, second: Tensor) -> list[int]:
    """Return the axes along which two tensors have other sizes."""
    if first.dim() != second.dim():
        return []
    return [axis for axis in range(first.dim()) if first.shape[axis] != second.shape[axis]]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds besides its tables."""
    return {
        key: value
        for key, value in vars(module).items()
        if "_hook" not in key and key not in ("_parameters", "_buffers", "_modules", "forward")
    }


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (list, dict, set, tuple)) else 0
