"""The full-precision reference: a copy of the training model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.errors import ReferenceModelError
from egeria.layers.batch import Batch
from egeria.layers.taps import capture, remove_ours
from egeria.layers.undisturbed import kept_random_state, undisturbed


class SnapshotReference:
    """A deep copy on a device, made at the first refresh and brought up to date in place after that.

    Parameters and buffers follow the model; numbers that a loop keeps in plain attributes (an annealed
    coefficient, a count of steps) stay as they were when the copy was made.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.model: nn.Module | None = None
        """The copy: the same object until shapes change, with weights replaced in place."""
        self._device = device

    def refresh(self, model: nn.Module) -> None:
        """Take over the weights and buffers of the training model as they are now.

        Raises:
            ReferenceModelError: the model cannot be copied.
        """
        if self.model is None or not _fits(self.model, model):
            self.model = _copied(model).to(self._device)
        else:
            _copy_tensors(self.model, _tensors(model))

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the output of submodule `tap` for the batch [B, ...]; None if it gives no tensor.

        Raises:
            ReferenceModelError: there was no refresh yet.
        """
        if self.model is None:
            raise ReferenceModelError("A reference is refreshed before it is asked, found none. Call `refresh` first.")
        with undisturbed(self.model):
            return capture(self.model, tap, batch)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the weights and buffers, empty before the first refresh."""
        if self.model is None:
            return {}
        return {"tensors": [tensor.detach().clone() for tensor in _tensors(self.model)]}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Continue from saved weights; `model` gives the architecture."""
        self.model = _copied(model).to(self._device) if state else None
        if self.model is not None:
            _copy_tensors(self.model, state["tensors"])


def _fits(copied: nn.Module, model: nn.Module) -> bool:
    """Return whether both hold tensors of the same shapes; a buffer may grow while training."""
    return [tensor.shape for tensor in _tensors(copied)] == [tensor.shape for tensor in _tensors(model)]


def _copied(model: nn.Module) -> nn.Module:
    # Tensors computed in a forward pass (old-style weight_norm keeps one) only copy once detached.
    computed = (tensor for module in model.modules() for tensor in tree.leaves(vars(module)) if not tensor.is_leaf)
    memo = {id(tensor): tensor.detach().clone() for tensor in computed}
    try:
        with kept_random_state(model):  # a model's own `__deepcopy__` may rebuild itself
            copied = copy.deepcopy(model, memo).requires_grad_(False)
    except Exception as error:
        raise ReferenceModelError(
            f"The reference is a deep copy of the model, which {type(model).__name__} does not allow: {error}. "
            f"Give it a `__deepcopy__`, or keep what cannot be copied out of its attributes."
        ) from error
    remove_ours(copied)
    return copied


def _copy_tensors(model: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for mine, theirs in zip(_tensors(model), values, strict=True):
            mine.copy_(theirs)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
