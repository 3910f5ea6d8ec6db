"""The one probe of a boundary: passes of our own that prove that the front can be left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from egeria import tree
from egeria.cache.boundary import Boundary, Kind, Layout, Record, require
from egeria.cache.rows import count_rows, is_cut, take, true_lengths, true_positions
from egeria.errors import UncacheableError, brief
from egeria.model.batch import Batch
from egeria.model.undisturbed import undisturbed
from egeria.random_state import random_fingerprint, seed_random_state

TOLERANCE = 1e-4
"""Relative difference that counts as rounding in float32 (law 3)."""
_TABLES = ("_parameters", "_buffers", "_modules", "forward")


def prove(boundary: Boundary, batch: Batch) -> None:
    """Find out how what crosses is taken apart by sample, and that the rest needs nothing else.

    Makes about four passes of our own, which leave no trace. The boundary gets its layout, and its
    first kind of call.

    Raises:
        UncacheableError: the frozen layers cannot be left out; the message is the reason.
    """
    num_rows = count_rows(batch)
    require(num_rows > 1, "a batch of one sample does not show what belongs to a sample")
    record = Record(boundary)
    try:
        computed = _make_pass(boundary, batch, record)
    except Exception as error:
        raise UncacheableError(f"the model cannot be run again ({brief(error)})") from error
    kind, value = boundary.learn(batch, record)
    boundary.limit = _tolerance(record)
    lengths, differing = true_lengths(batch), ""
    for layout in _find_layouts(boundary, batch, value, lengths):
        given = layout.join(layout.split(value, lengths), kind, value.device)
        require(given is not None, f"what {boundary.tap} gives cannot be put together again")
        assert given is not None
        boundary.layout = layout
        if not (differing := _find_difference(boundary, batch, kind, given, computed)):
            return
    boundary.layout = None
    advice = "; call the model with use_cache=False" if "key_values" in differing else ""
    raise UncacheableError(
        f"without the frozen layers {differing} differs, though what {boundary.tap} gives is "
        f"given back: the rest of the model reads more of them than that{advice}"
    )


def _find_difference(
    boundary: Boundary, batch: Batch, kind: Kind, value: Tensor, computed: Mapping[str, Any]
) -> str:
    """Return the name of the first thing that differs in a pass without the front, or ''.

    Roots that depend on no frozen output, such as a table of positions that later layers read too,
    run live where nothing else helps.
    """
    layout = boundary.layout
    is_cut_short = layout is not None and layout.length_axis is not None
    kept = true_positions(batch) if is_cut_short and boundary.ignores_padding else None
    differing = ""
    for _ in range(2):
        boundary.independent = set()
        try:
            given = _make_pass(boundary, batch, kind=kind, value=value.clone())
            pair = _without_padding(given, kept), _without_padding(computed, kept)
            differing = first_difference(*pair, boundary.limit)
        except Exception as error:
            differing = f"the pass fails ({brief(error)}), and nothing"
        independent, boundary.independent = boundary.independent - {boundary.tap}, None
        if not differing:
            return ""
        if boundary.live or not independent:
            break
        boundary.live = frozenset(independent)
    boundary.live = frozenset()
    return differing


def _make_pass(
    boundary: Boundary,
    batch: Batch,
    record: Record | None = None,
    *,
    kind: Kind | None = None,
    value: Tensor | None = None,
) -> dict[str, Any]:
    """Run the model, without its front where there is a `kind`, and return all that the pass gave
    and changed, by name.
    """
    model, own = boundary.model, batch.first_rows(None)  # a model may overwrite its input
    with undisturbed(model, as_training=True):
        seed_random_state(model, 0)
        if record is not None:
            record.open()  # the hooks go with the end of the block
        with own.autocast.context():
            if kind is None or value is None:
                output = model(*own.args, **own.kwargs)
            else:
                with boundary.replaying(kind, value):
                    output = model(*own.args, **own.kwargs)
        parts = {"output": output, "argument": own.arguments, "buffer": dict(model.named_buffers())}
        for name, module in model.named_modules():
            held = {key: entry for key, entry in vars(module).items() if key not in _TABLES}
            parts[f"attribute {name}"] = {k: held[k] for k in held if "_hook" not in k}
        outcome = {
            name: entry.detach().clone() if isinstance(entry, Tensor) else entry
            for part, content in parts.items()
            for name, entry in tree.contents(content, part)
        }
        outcome["random numbers"] = random_fingerprint(model)
    return outcome


def _find_layouts(
    boundary: Boundary, batch: Batch, value: Tensor, lengths: Sequence[int] | None
) -> Iterator[Layout]:
    """Yield how what crosses may be taken apart by sample, best first."""
    num_rows = count_rows(batch)
    whole = _find_layout(boundary, batch, value, num_rows)
    axis = None if lengths is None else _find_length_axis(boundary, batch, whole, value, lengths)
    if axis is not None:
        rows = [(name, e) for name, e in batch.contents if isinstance(e, Tensor)]
        names = frozenset(name for name, entry in rows if is_cut(entry, batch))
        yield replace(whole, length_axis=axis, cut_names=names)
    yield whole


def _find_layout(boundary: Boundary, batch: Batch, value: Tensor, num_rows: int) -> Layout:
    """Find the axis of samples by running half of them: no row may depend on others."""
    some, tap = list(range(num_rows - 1, -1, -2)), boundary.tap
    try:
        part = boundary.run_front(take(batch, some))
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
        _is_close(part, expected, boundary.limit),
        f"what {tap} gives for a sample is random, or depends on the other samples of its "
        "batch or on earlier calls",
    )
    return Layout.of(value, axes[0])


def _find_length_axis(
    boundary: Boundary, batch: Batch, layout: Layout, value: Tensor, lengths: Sequence[int]
) -> int | None:
    """Return the axis of a row that follows the length, by running the shorter rows of the batch
    with their padding cut; None where there is none.
    """
    full = batch.kwargs["attention_mask"].shape[1]
    short = max((length for length in lengths if length < full), default=0)
    chosen = [row for row, length in enumerate(lengths) if length <= short]
    try:
        part = boundary.run_front(take(batch, chosen, short))
    except Exception:  # whatever a model raises on sequences cut short
        return None
    rows, found = layout.split(value, None), layout.split(part, None)
    expected = [rows[index] for index in chosen]
    axes = _changed(expected[0], found[0])
    if [(expected[0].shape[axis], found[0].shape[axis]) for axis in axes] != [(full, short)]:
        return None
    agree = all(
        _is_close(first.narrow(axes[0], 0, n), second.narrow(axes[0], 0, n), boundary.limit)
        for first, second, n in zip(found, expected, (lengths[row] for row in chosen), strict=True)
    )
    return axes[0] if agree else None


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
        if name not in found or name not in computed:
            return name
        first, second = found[name], computed[name]
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            is_same = _is_close(first, second, limit)
        else:
            is_same = type(first) is type(second) and bool(first == second)
        if not is_same:
            return name
    return ""


def _without_padding(outcome: Mapping[str, Any], kept: Tensor | None) -> dict[str, Any]:
    """Return what a pass gave, of the output for each position [B, T, ...] only the `kept` ones."""
    found = dict(outcome)
    if kept is not None:
        outputs = [name for name in found if name.startswith("output")]
        for name in [n for n in outputs if getattr(found[n], "shape", ())[:2] == kept.shape]:
            found[name] = found[name][kept.to(found[name].device)]
    return found


def _changed(first: Tensor, second: Tensor) -> list[int]:
    """Return the axes along which two tensors have other sizes."""
    if first.dim() != second.dim():
        return []
    return [axis for axis in range(first.dim()) if first.shape[axis] != second.shape[axis]]
