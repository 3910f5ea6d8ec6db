"""The training losses of one interval, kept on their device until the interval ends."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from egeria.errors import ConfigError


class Losses:
    """Collects one loss a step; the device is asked once, when the mean is taken."""

    def __init__(self) -> None:
        self._values: list[float | Tensor] = []

    def add(self, loss: Any) -> None:
        """Take in the loss of one step.

        Raises:
            ConfigError: it is neither a number nor a tensor of one element.
        """
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._values.append(loss.detach().reshape(()).clone())
            return
        try:
            if isinstance(loss, (Tensor, str)):
                raise TypeError
            self._values.append(float(loss))
        except TypeError as error:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r}"
            raise ConfigError(
                f"run.step(loss) takes the loss of the step as a number or a 0-d tensor, found {found}. "
                f"Reduce it first, for instance with loss.mean()."
            ) from error

    def take_mean(self) -> tuple[float | None, int]:
        """Return the mean of the finite losses (None without any) and the number of the others; reset both."""
        values = self.read()
        self._values = []
        finite = [value for value in values if math.isfinite(value)]
        return (statistics.fmean(finite) if finite else None), len(values) - len(finite)

    def read(self) -> list[float]:
        """Return the losses so far as numbers; synchronises the device."""
        tensors = [value.float() for value in self._values if isinstance(value, Tensor)]
        if len({tensor.device for tensor in tensors}) > 1:
            tensors = [tensor.cpu() for tensor in tensors]
        numbers = iter(torch.stack(tensors).tolist() if tensors else [])
        return [next(numbers) if isinstance(value, Tensor) else value for value in self._values]

    def restore(self, values: list[float]) -> None:
        """Go on from the losses of a saved state."""
        self._values = list(values)
