"""What share of the forward pass each layer module takes, in floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.layers.undisturbed import undisturbed


def forward_shares(model: nn.Module, modules: Sequence[LayerModule], batch: Batch) -> list[float] | None:
    """Count the operations of one forward pass and share them out over the layer modules.

    Operations outside every listed submodule (a functional head, say) count for the last module.

    Returns:
        One share per module, summing to 1; None where nothing could be counted.
    """
    counter = FlopCounterMode(display=False)
    copied = batch.first_rows(None)
    with undisturbed(model), counter, batch.autocast.context():
        model(*copied.args, **copied.kwargs)
    total = counter.get_total_flops()
    if not total:
        return None
    counts = {name: sum(operations.values()) for name, operations in counter.get_flop_counts().items()}
    root = type(model).__name__
    shares = [sum(counts.get(f"{root}.{name}", 0) for name in module.submodules) / total for module in modules]
    shares[-1] += max(0.0, 1 - sum(shares))
    return shares
