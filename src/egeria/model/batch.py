"""One training batch as the model was called with it, kept for the evaluation that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from egeria import tree

OF_THE_LOSS = "num_items_in_batch"
"""By which models of transformers divide their loss: of an optimizer step, not of a sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Autocast:
    """The mixed-precision setting a forward pass ran under."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device_type: str) -> Autocast:
        """Return the setting in force for a type of device."""
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)
        return cls(device_type=device_type, enabled=enabled, dtype=dtype)

    def context(self) -> torch.autocast:
        """Return a context with this setting."""
        # A forward pass in training must not find weights in the cache that were cast without
        # gradients.
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Arguments of one call of the model; tensors are shared with the caller, not copied."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: Autocast

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_type: str) -> Batch:
        """Return the arguments of a call that is being made, and what holds for it."""
        return cls(args=args, kwargs=kwargs, autocast=Autocast.current(device_type))

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments as one tree."""
        return self.args, dict(self.kwargs)

    @property
    def needs_grad(self) -> bool:
        """Whether something in front of the model is in training too, such as a soft prompt."""
        return tree.requires_grad(self.arguments)

    @property
    def num_rows(self) -> int | None:
        """Samples, where all of its tensors but that of the loss agree on their number."""
        named = [value for name, value in self.kwargs.items() if name != OF_THE_LOSS]
        return tree.num_rows((self.args, named))

    @property
    def unreadable(self) -> str:
        """Path and type of an argument that cannot be read, see `tree.unreadable`."""
        return tree.unreadable(self.args, "args") or tree.unreadable(dict(self.kwargs), "kwargs")

    @property
    def contents(self) -> list[tuple[str, Any]]:
        """Tensors and plain values but that of the loss, by their paths in `arguments`, sorted."""
        found = (entry for entry in tree.contents(self.arguments) if OF_THE_LOSS not in entry[0])
        return sorted(found, key=itemgetter(0))

    def first_rows(self, count: int | None) -> Batch:
        """Return a copy cut to `count` samples, detached; whole where that is None or not possible.

        What the loss is divided by stays as it is. A copy, because a model may overwrite its input.
        """
        args, kwargs = tree.map_tensors(torch.Tensor.detach, self.arguments)
        of_the_loss = {name: kwargs.pop(name) for name in (OF_THE_LOSS,) if name in kwargs}
        cut = (args, kwargs) if count is None else tree.take_rows((args, kwargs), count)
        args, kwargs = tree.map_tensors(torch.clone, (cut[0], {**cut[1], **of_the_loss}))
        return replace(self, args=args, kwargs=kwargs)

    def on(self, device: str) -> Batch:
        """Return the same with its tensors on a device."""
        args, kwargs = tree.map_tensors(lambda tensor: tensor.to(device), self.arguments)
        return replace(self, args=args, kwargs=kwargs)
