"""The one probe of a boundary: passes of our own that prove that the front can be left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.cache.boundary import Boundary, Layout, Record, require
from egeria.cache.rows import count_rows, is_cut, take, true_lengths, true_positions
from egeria.errors import UncacheableError, brief
from egeria.model.passes import Batch, capture, undisturbed
from egeria.random_state import random_fingerprint, seed_random_state

TOLERANCE = 1e-4
"""Relative difference that counts as rounding in float32 (law 3)."""
_TABLES = ("_parameters", "_buffers", "_modules", "forward")


def prove(boundary: Boundary, batch: Batch, ignores_padding: bool) -> Layout:
    """Return how what crosses is taken apart by sample, where the rest needs nothing else.

    Makes about four passes of our own, which leave no trace. The boundary learns its first kind of
    call. `ignores_padding` tells that the loss does not depend on what the model gives at padding.

    Raises:
        UncacheableError: the frozen layers cannot be left out; the message is the reason.
    """
    model = boundary.model
    try:
        with undisturbed(model, as_training=True):
            record = boundary.record()  # its hooks go with the end of the block
            computed = _run(model, batch)
    except Exception as error:
        raise UncacheableError(f"the model cannot be run again ({brief(error)})") from error
    kind, value = boundary.learn(batch, record)
    lengths, differing = true_lengths(batch), ""
    for layout in _find_layouts(boundary, batch, value, _tolerance(record)):
        given = layout.join(layout.split(value, lengths), kind, value.device)
        if given is None:
            raise UncacheableError(f"what {boundary.tap} gives cannot be put together again")
        kept = true_positions(batch) if layout.cut_names and ignores_padding else None
        try:
            with undisturbed(model, as_training=True), boundary.replaying(kind, given):
                outcomes = _run(model, batch), computed
            own, wanted = (_without_padding(outcome, kept) for outcome in outcomes)
            differing = first_difference(own, wanted, layout.limit)
        except Exception as error:
            differing = f"the pass fails ({brief(error)}), and nothing"
        if not differing:
            return layout
    advice = "; call the model with use_cache=False" if "key_values" in differing else ""
    raise UncacheableError(
        f"without the frozen layers {differing} differs, though what {boundary.tap} gives is "
        f"given back: the rest of the model reads more of them than that{advice}"
    )


def _run(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Run a model within `undisturbed`; return all that the pass gave and changed, by name."""
    own = batch.first_rows(None)  # a model may overwrite its input
    seed_random_state(model, 0)
    with own.autocast.context():
        output = model(*own.args, **own.kwargs)
    parts = {"output": output, "argument": own.arguments, "buffer": dict(model.named_buffers())}
    for name, module in model.named_modules():
        held = {key: entry for key, entry in vars(module).items() if key not in _TABLES}
        parts[f"attribute {name}"] = {key: held[key] for key in held if "_hook" not in key}
    outcome = {
        name: entry.detach().clone() if isinstance(entry, Tensor) else entry
        for part, content in parts.items()
        for name, entry in tree.contents(content, part)
    }
    return {**outcome, "random numbers": random_fingerprint(model)}


def _run_front(boundary: Boundary, batch: Batch) -> Tensor:
    """Return what crosses for a batch, with other random numbers."""
    with undisturbed(boundary.model, as_training=True):
        seed_random_state(boundary.model, 1)
        found = capture(boundary.model, boundary.tap, batch)
    assert found is not None
    return found


def _find_layouts(
    boundary: Boundary, batch: Batch, value: Tensor, limit: float
) -> Iterator[Layout]:
    """Yield how what crosses may be taken apart by sample, best first."""
    whole = _find_layout(boundary, batch, value, limit)
    if (axis := _find_length_axis(boundary, batch, whole, value)) is not None:
        rows = [(name, e) for name, e in batch.contents if isinstance(e, Tensor)]
        names = frozenset(name for name, entry in rows if is_cut(entry, batch))
        yield replace(whole, length_axis=axis, cut_names=names)
    yield whole


def _find_layout(boundary: Boundary, batch: Batch, value: Tensor, limit: float) -> Layout:
    """Find the axis of samples by running half of them: no row may depend on others."""
    num_rows, tap = count_rows(batch), boundary.tap
    require(num_rows > 1, "a batch of one sample does not show what belongs to a sample")
    some = list(range(num_rows - 1, -1, -2))
    try:
        part = _run_front(boundary, take(batch, some))
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
        _is_close(part, expected, limit),
        f"what {tap} gives for a sample is random, or depends on the other samples of its "
        "batch or on earlier calls",
    )
    return Layout(axis=axes[0], limit=limit)


def _find_length_axis(
    boundary: Boundary, batch: Batch, layout: Layout, value: Tensor
) -> int | None:
    """Return the axis of a row that follows the length, by running the shorter rows of the batch
    with their padding cut; None where there is none.
    """
    if true_positions(batch) is None or (lengths := true_lengths(batch)) is None:
        return None
    full = batch.kwargs["attention_mask"].shape[1]
    short = max(length for length in lengths if length < full)
    chosen = [row for row, length in enumerate(lengths) if length <= short]
    try:
        part = _run_front(boundary, take(batch, chosen, short))
    except Exception:  # whatever a model raises on sequences cut short
        return None
    rows, found = layout.split(value, None), layout.split(part, None)
    axes = _changed(rows[0], found[0])
    if [(rows[0].shape[axis], found[0].shape[axis]) for axis in axes] != [(full, short)]:
        return None
    for index, row in zip(chosen, found, strict=True):
        own, expected = (entry.narrow(axes[0], 0, lengths[index]) for entry in (row, rows[index]))
        if not _is_close(own, expected, layout.limit):
            return None
    return axes[0]


def _tolerance(record: Record) -> float:
    """Return the relative difference that the precision of a recorded pass allows."""
    autocast = record.autocast
    if autocast is not None and autocast.enabled:
        return max(TOLERANCE, 8 * torch.finfo(autocast.dtype).eps)
    is_cuda = autocast is not None and autocast.device_type == "cuda"
    uses_tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return 8 * 2.0**-10 if is_cuda and uses_tf32 else TOLERANCE


def _is_close(first: Tensor, second: Tensor, limit: float) -> bool:
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
        first, second = found.get(name, ...), computed.get(name, ...)
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            is_same = _is_close(first, second, limit)
        else:
            is_same = type(first) is type(second) and bool(first == second)
        if not is_same:
            return name
    return ""


def _without_padding(outcome: dict[str, Any], kept: Tensor | None) -> dict[str, Any]:
    """Return what a pass gave, of the output for each position [B, T, ...] only the `kept` ones."""
    if kept is None:
        return outcome
    found = {name: e for name, e in outcome.items() if name.startswith("output")}
    cut = {name: e for name, e in found.items() if getattr(e, "shape", ())[:2] == kept.shape}
    return {**outcome, **{name: entry[kept.to(entry.device)] for name, entry in cut.items()}}


def _changed(first: Tensor, second: Tensor) -> list[int]:
    """Return the axes along which two tensors have other sizes."""
    if first.dim() != second.dim():
        return []
    return [axis for axis in range(first.dim()) if first.shape[axis] != second.shape[axis]]
