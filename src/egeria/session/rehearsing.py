"""Rehearsing a freeze: a forward pass before it and one after it show whether an output loses its
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.layers.shards import outline
from egeria.layers.undisturbed import undisturbed
from egeria.session.following import Training

MOST_ROWS = 4
"""Samples of a rehearsal, where the model runs on so few: two graphs of a whole batch may not fit
beside each other."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The outputs in one forward pass, with their graph."""

    boundaries: Sequence[Sequence[Tensor]]
    """Of each of some layer modules."""
    outputs: Sequence[Tensor]
    """Of the model."""


def rehearse(training: Training, modules: Sequence[LayerModule], batch: Batch) -> Rehearsal | None:
    """Run the model once, undisturbed but with gradients.

    Returns:
        What came out; None for a sharded model, of which only an outline runs, where that does not
        run either.

    Raises:
        Exception: what the model raises on the whole batch.
    """
    if (batch.num_rows or 0) > MOST_ROWS:
        with suppress(Exception):
            return _run(training.model, modules, batch.first_rows(MOST_ROWS))
    try:
        return _run(training.model, modules, batch.first_rows(None))
    except Exception as error:
        if not training.is_sharded:
            raise
        training.recorder.decline(
            "rehearsing a freeze", f"the model does not run without its values ({error})"
        )
        return None


def _run(model: nn.Module, modules: Sequence[LayerModule], batch: Batch) -> Rehearsal:
    boundaries: list[list[Tensor]] = [[] for _ in modules]
    model, batch = outline(model, batch)
    with undisturbed(model, gradients=True), batch.autocast.context(), ExitStack() as hooks:
        for module, boundary in zip(modules, boundaries, strict=True):
            tap: nn.Module = model.get_submodule(module.tap)
            hooks.callback(tap.register_forward_hook(_make_note(boundary)).remove)
        output = model(*batch.args, **batch.kwargs)
    return Rehearsal(boundaries, _tensors(output))


def _make_note(boundary: list[Tensor]) -> Callable[..., None]:
    return lambda *call: boundary.extend(_tensors(call[-1]))


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors of an output; those in objects of the user's own where there are no
    others.
    """
    found = list(tree.leaves(output))
    return found or [entry for _, entry in tree.contents(output) if isinstance(entry, Tensor)]


def find_branch(
    modules: Sequence[LayerModule], before: Rehearsal, after: Rehearsal
) -> LayerModule | None:
    """Return the first of some layer modules whose freeze takes the gradient of an output; None for
    none.
    """
    pairs = zip(modules, before.boundaries, strict=True)
    return next(
        (module for module, own in pairs if _is_branch(own, before.outputs, after.outputs)), None
    )


def _is_branch(
    boundary: Sequence[Tensor], before: Sequence[Tensor], after: Sequence[Tensor]
) -> bool:
    """Return whether freezes took the gradient of an output, and no output that keeps one depends
    on a layer module.

    A hidden state that is put out beside the loss may lose its gradient; a head of its own may not.

    Args:
        boundary: what the layer module put out before them.
        before: what the model put out.
        after: the same, after them.
    """
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0].requires_grad]
    kept = [now.float().sum() for now, later in pairs if later.requires_grad]
    sources = [tensor for tensor in boundary if tensor.requires_grad]
    if len(kept) == len(pairs) or not sources:
        return False
    if not kept:
        return True
    found = torch.autograd.grad(kept, sources, allow_unused=True, retain_graph=True)
    return not any(entry is not None for entry in found)
