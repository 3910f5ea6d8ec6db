"""The proof of a boundary: passes of our own that show that the front can be skipped."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.cache.boundary import Boundary, Layout, Record, require
from egeria.cache.rows import count_rows, is_cut, take, true_lengths, true_positions
from egeria.errors import UncacheableError, brief
from egeria.model.passes import Batch, captures, undisturbed
from egeria.random_state import random_fingerprint, seed_random_state

TOLERANCE = 1e-4  # relative difference that counts as rounding in float32 (law 3)
_TABLES = ("_parameters", "_buffers", "_modules", "forward")


def prove(boundary: Boundary, batch: Batch, ignores_padding: bool) -> Layout:
    """Return how what crosses is divided into samples, if the rest needs nothing else.

    It makes about four passes, which leave no trace. The boundary learns its first kind of call.
    `ignores_padding` says that the loss does not depend on the output at padding.

    Raises:
        UncacheableError: the frozen layers cannot be skipped; the message is the reason.
    """
    model = boundary.model
    try:
        with undisturbed(model, as_training=True):
            record = boundary.record()  # its hooks are gone at the end of the block
            computed = _run(model, batch)
    except Exception as error:
        raise UncacheableError(f"the model cannot be run again ({brief(error)})") from error
    kind, value = boundary.learn(batch, record)
    limit, lengths, differing = _tolerance(record), true_lengths(batch), ""
    _check_rows(boundary, batch, value, limit)
    layouts = [Layout(limit=limit)]
    if _can_cut(boundary, batch, value, limit):  # then that is better
        names = (name for name, e in batch.contents if isinstance(e, Tensor) and is_cut(e, batch))
        layouts.insert(0, Layout(limit=limit, cut_names=frozenset(names)))
    for layout in layouts:
        given = layout.join(layout.split(value, lengths), kind, value.device)
        assert given is not None  # the rows are of this very batch
        kept = true_positions(batch) if layout.cut_names and ignores_padding else None
        try:
            with undisturbed(model, as_training=True), boundary.replaying(kind, given):
                outcomes = _run(model, batch), computed
            own, wanted = (_without_padding(outcome, kept) for outcome in outcomes)
            differing = first_difference(own, wanted, limit)
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
        return captures(boundary.model, [boundary.tap], batch)[boundary.tap]


def _check_rows(boundary: Boundary, batch: Batch, value: Tensor, limit: float) -> None:
    """Run the front on half of the samples: no row of what crosses may depend on others."""
    num_rows, tap = count_rows(batch), boundary.tap
    require(num_rows > 1, "a batch of one sample does not show what belongs to a sample")
    some = list(range(num_rows - 1, -1, -2))
    try:
        part = _run_front(boundary, take(batch, some))
    except Exception as error:
        reason = f"the frozen layers fail on some rows of a batch ({brief(error)})"
        raise UncacheableError(reason) from error
    require(
        value.shape == (num_rows, *part.shape[1:]) and len(part) == len(some),
        f"what {tap} gives does not have one row for each sample: {tuple(value.shape)} for "
        f"{num_rows} samples, {tuple(part.shape)} for {len(some)}",
    )
    require(
        _is_close(part, value[some], limit),
        f"what {tap} gives for a sample is random, or depends on the other samples of its "
        "batch or on earlier calls",
    )


def _can_cut(boundary: Boundary, batch: Batch, value: Tensor, limit: float) -> bool:
    """Return whether shorter rows of a batch [B, T, ...] are the same without their padding."""
    if true_positions(batch) is None or (lengths := true_lengths(batch)) is None:
        return False
    full = batch.kwargs["attention_mask"].shape[1]
    short = max(length for length in lengths if length < full)
    chosen = [row for row, length in enumerate(lengths) if length <= short]
    try:
        part = _run_front(boundary, take(batch, chosen, short))
    except Exception:  # whatever a model raises for shorter sequences
        return False
    if value.shape[1] != full or part.shape != (len(chosen), short, *value.shape[2:]):
        return False
    ends = [(row, lengths[row]) for row in chosen]
    pairs = [(own[:n], value[row, :n]) for own, (row, n) in zip(part, ends, strict=True)]
    return all(_is_close(*pair, limit) for pair in pairs)


def _tolerance(record: Record) -> float:
    """Return the relative difference that the precision of a recorded pass allows."""
    autocast = record.autocast
    if autocast is not None and autocast.enabled:
        return max(TOLERANCE, 8 * torch.finfo(autocast.dtype).eps)
    is_cuda = autocast is not None and autocast.device_type == "cuda"
    uses_tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return 8 * 2.0**-10 if is_cuda and uses_tf32 else TOLERANCE


def _is_close(first: Tensor, second: Tensor, limit: float) -> bool:
    """Return whether two tensors are equal up to rounding, also that of their own dtype."""
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
    """Return the name of the first entry that differs beyond rounding, or an empty string."""
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
    """Return an outcome; of outputs for each position [B, T, ...] only the `kept` ones."""
    if kept is None:
        return outcome
    found = {name: e for name, e in outcome.items() if name.startswith("output")}
    cut = {name: e for name, e in found.items() if getattr(e, "shape", ())[:2] == kept.shape}
    return {**outcome, **{name: entry[kept.to(entry.device)] for name, entry in cut.items()}}
