"""Taking the output of one submodule out of a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from egeria import tree
from egeria.layers.batch import Batch


class _ReachedError(BaseException):
    """Ends a forward pass at the tap; a BaseException, so that no handler in a model swallows it."""


def capture(model: nn.Module, tap: str, batch: Batch) -> Tensor | None:
    """Return the activation of submodule `tap` for the batch, running the model no further than it.

    Returns:
        The first floating-point tensor of the submodule's output [B, ...], detached; None if the
        submodule was not called or returned no such tensor.
    """
    captured: list[Any] = []

    def stop(_module: nn.Module, _args: Any, output: Any) -> None:
        captured.append(output)
        raise _ReachedError

    handle = model.get_submodule(tap).register_forward_hook(stop)
    try:
        with batch.autocast.context():
            model(*batch.args, **batch.kwargs)
    except _ReachedError:
        pass
    finally:
        handle.remove()
    activation = tree.first_activation(captured)
    return None if activation is None else activation.detach()


class TrainingTap:
    """Keeps the activation of one submodule from the user's own training forward (the paper's way).

    Rows beyond `num_rows` are left out; what is kept is a copy, since an in-place operation behind
    the tap may overwrite the original.
    """

    def __init__(self, model: nn.Module, tap: str, num_rows: int) -> None:
        self.activation: Tensor | None = None
        self._num_rows = num_rows
        self._handle: RemovableHandle = model.get_submodule(tap).register_forward_hook(self._keep)

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingTap:
        return self  # it watches one model, and a copy of that takes the hook along for a moment

    def _keep(self, module: nn.Module, _args: Any, output: Any) -> None:
        activation = tree.first_activation(output)
        if activation is not None and module.training and torch.is_grad_enabled():
            self.activation = activation.detach()[: self._num_rows].clone()
