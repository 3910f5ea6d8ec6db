"""The tensors of frozen layers that something was made from, and whether they still are what they were."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from egeria.layers.shards import own_part

IGNORED = "num_batches_tracked"
Entry = tuple[Mapping[str, Tensor | None], str]
"""A table of a module, and the name of a parameter or buffer in it."""


class Sources:
    """Tells whether tensors were assigned, written to, or set to train.

    What writes through `data` (averages of weights, Lookahead) leaves no trace but the values, and mostly concerns
    all weights: so the smallest are compared by value.

    Args:
        entries: where the tensors are.
        num_compared: how many are compared by value.
    """

    def __init__(self, entries: Iterable[Entry], *, num_compared: int) -> None:
        self._found = [(table, name, _version(table[name])) for table, name in entries if name != IGNORED]
        tensors = [table[name] for table, name, _ in self._found]
        weights: list[Tensor] = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        smallest = sorted(weights, key=Tensor.numel)[:num_compared]
        self._compared = [(weight, own_part(weight).detach().clone()) for weight in smallest]

    @classmethod
    def of(cls, *modules: nn.Module) -> Sources:
        """Return those of some modules without what is in them; compares one, unless that waits for an accelerator."""
        tables = [table for module in modules for table in (module._parameters, module._buffers)]
        entries = [(table, name) for table in tables for name in table]
        tensors = [tensor for table in tables for tensor in table.values() if tensor is not None]
        return cls(entries, num_compared=int(all(tensor.is_cpu for tensor in tensors)))

    @property
    def have_changed(self) -> bool:
        """Whether one is not what it was."""
        if any(_version(table.get(name)) != version for table, name, version in self._found):
            return True
        return not all(torch.equal(own_part(weight), before) for weight, before in self._compared)


def _version(tensor: Tensor | None) -> tuple[int, int, int, bool]:
    """Return what changes with every assignment, with every change in place that torch knows of, and with a thaw."""
    if tensor is None:
        return 0, 0, 0, False
    return id(tensor), tensor._version, own_part(tensor).data_ptr(), tensor.requires_grad


def checksum(places: Iterable[Entry]) -> int:
    """Return a checksum of the values of tensors."""
    found = 0
    for table, name in places:
        tensor = table[name]
        if tensor is not None:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return found
