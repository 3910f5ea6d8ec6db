"""Hooks on submodules: reading the output of one, and counting operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from egeria import tree
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.layers.undisturbed import undisturbed


class TapReachedError(BaseException):
    """Ends a forward pass that has run far enough; a BaseException, so that no handler in a model
    swallows it.
    """


def capture(model: nn.Module, tap: str, batch: Batch) -> Tensor | None:
    """Return the activation of submodule `tap` for the batch, running the model no further than it.

    That is the first floating-point tensor of its output [B, ...], detached; None if it was not
    called or has none.
    """
    captured: list[Any] = []

    def stop(_module: nn.Module, _args: Any, output: Any) -> None:
        captured.append(output)
        raise TapReachedError

    handle = model.get_submodule(tap).register_forward_hook(stop)
    try:
        with batch.autocast.context():
            model(*batch.args, **batch.kwargs)
    except TapReachedError:
        pass
    finally:
        handle.remove()
    activation = tree.first_activation(captured)
    return None if activation is None else activation.detach()


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Let no parameter need a gradient: the counter looks for the graph of what does, and views
    have none here.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def forward_shares(
    model: nn.Module, modules: Sequence[LayerModule], batch: Batch
) -> list[float] | None:
    """Return the share of each layer module in the operations of one forward pass; None where none
    can be counted.

    They sum to 1: operations outside every listed submodule (a functional head, say) count for the
    last module.
    """
    counter = FlopCounterMode(display=False)
    copied = batch.first_rows(None)
    with undisturbed(model), _without_gradients(model), counter, batch.autocast.context():
        model(*copied.args, **copied.kwargs)
    total = counter.get_total_flops()
    if not total:
        return None
    counts = {
        name: sum(operations.values()) for name, operations in counter.get_flop_counts().items()
    }
    root = type(model).__name__
    shares = [
        sum(counts.get(f"{root}.{name}", 0) for name in module.submodules) / total
        for module in modules
    ]
    shares[-1] += max(0.0, 1 - sum(shares))
    return shares
