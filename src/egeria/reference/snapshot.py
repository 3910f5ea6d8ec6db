"""What a reference model is, and the full-precision one: a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.errors import ReferenceModelError
from egeria.layers.batch import Batch
from egeria.layers.taps import capture, remove_ours
from egeria.layers.undisturbed import kept_random_state, undisturbed


class Reference(Protocol):
    """A model like the one in training, with the weights of some evaluations ago."""

    @property
    def builder(self) -> str:
        """How it is made, for the journal ("int8 static, x86 engine, 53 of 54 weighted layers")."""
        ...

    def refresh(self, model: nn.Module, batch: Batch | None = None) -> None:
        """Take over the weights of the training model as they are now.

        Args:
            model: the training model.
            batch: the newest training batch, detached and of a few rows, to calibrate on.
        """
        ...

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the output of submodule `tap` for the batch [B, ...]; None if it gives no tensor."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what it takes to go on, empty before the first refresh."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Restore a saved state, giving the same activations to the bit; `model` gives the architecture."""
        ...


class SnapshotReference:
    """A deep copy, made at the first refresh and brought up to date in place after that.

    Parameters and buffers follow the model; numbers that a loop keeps in plain attributes (an annealed
    coefficient, a count of steps) stay as they were when the copy was made.

    Args:
        device: where the copy lives; None for where the model is.
    """

    builder = "fp32 snapshot"

    def __init__(self, device: str | None = None) -> None:
        self._copy: nn.Module | None = None
        self._device = device

    @property
    def model(self) -> nn.Module | None:
        """The copy: the same object until shapes change, with weights replaced in place."""
        return self._copy

    def refresh(self, model: nn.Module, batch: Batch | None = None) -> None:
        """Take over the weights and buffers of the training model as they are now.

        Args:
            model: the training model.
            batch: not needed: there is nothing to calibrate.

        Raises:
            ReferenceModelError: the model cannot be copied.
        """
        if self._copy is None or not _fits(self._copy, model):
            self._copy = self._copied(model)
            return
        with torch.no_grad():
            for mine, theirs in zip(_tensors(self._copy), _tensors(model), strict=True):
                mine.copy_(theirs)

    def activation(self, tap: str, batch: Batch) -> Tensor | None:
        """Return the output of submodule `tap` for the batch [B, ...].

        Raises:
            ReferenceModelError: there was no refresh yet.
        """
        if self._copy is None:
            raise ReferenceModelError("A reference is refreshed before it is asked, found none. Call `refresh` first.")
        with undisturbed(self._copy):
            return capture(self._copy, tap, batch)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the weights and buffers, empty before the first refresh."""
        if self._copy is None:
            return {}
        return {"tensors": [tensor.detach().clone() for tensor in _tensors(self._copy)]}

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Go on from saved weights."""
        if not state:
            self._copy = None
            return
        self._copy = self._copied(model)
        with torch.no_grad():
            for mine, saved in zip(_tensors(self._copy), state["tensors"], strict=True):
                mine.copy_(saved)

    def _copied(self, model: nn.Module) -> nn.Module:
        copied = _copied(model)
        return copied if self._device is None else copied.to(self._device)


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


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
