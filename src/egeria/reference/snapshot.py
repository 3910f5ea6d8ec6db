"""The snapshot: a float32 copy of the model in training, and reading activations of such a copy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.errors import ReferenceModelError
from egeria.model.batch import Batch
from egeria.model.copies import copies_of_computed, remove_ours, take_off_wrappers
from egeria.model.undisturbed import TapReachedError, undisturbed
from egeria.random_state import kept_random_state


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def take_snapshot(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of the model as it is now, without hooks of ours and without gradients.

    Its tensors are made on `device` at once: the model's own device may have no room for them.

    Raises:
        ReferenceModelError: the model cannot be copied, or a copy is not apart from it.
    """
    tensors = tensors_of(model)
    copies = {id(tensor): _copy(tensor, device) for tensor in tensors if _is_plain(tensor)}
    try:
        with kept_random_state(model):  # a `__deepcopy__` of the model's own may rebuild it
            copied = copy.deepcopy(model, copies_of_computed(model) | copies)
    except Exception as error:
        raise ReferenceModelError(
            f"The reference is a deep copy of the model, which {type(model).__name__} does not "
            f"allow: {error}. "
            f"Give it a `__deepcopy__`, or keep what cannot be copied out of its attributes."
        ) from error
    before = {id(entry) for entry in (*model.modules(), *tensors)}
    if any(id(entry) in before for entry in (*copied.modules(), *tensors_of(copied))):
        raise ReferenceModelError(
            f"The reference is a deep copy of the model, and the `__deepcopy__` of "
            f"{type(model).__name__} gives one that shares modules or weights with the model. "
            "Let it copy all of them."
        )
    remove_ours(copied)
    take_off_wrappers(copied)
    for module in copied.modules():
        module.training = False  # a `train` of the model's own may do more
    return copied.requires_grad_(False).to(device)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    copied = tensor.detach().to(device, copy=True)
    return nn.Parameter(copied, False) if isinstance(tensor, nn.Parameter) else copied


def read(model: nn.Module, taps: Sequence[str], batch: Batch) -> dict[str, Tensor]:
    """Return the activations [B, ...] of submodules for a batch.

    The model is one of our own, and runs no further than to the last of them. Those that were not
    called, or gave no tensor, are left out.
    """
    missing, found = set(taps), dict[str, Tensor]()

    def keep(tap: str, _module: nn.Module, _args: Any, output: Any) -> None:
        activation = tree.first_activation(output)
        if activation is not None and tap in missing:
            found[tap] = activation.detach().clone()
        missing.discard(tap)
        if not missing:
            raise TapReachedError

    batch = batch.first_rows(None)  # a copy: a model may overwrite its input
    with undisturbed(model), ExitStack() as hooks, suppress(TapReachedError):
        for tap in taps:
            handle = model.get_submodule(tap).register_forward_hook(partial(keep, tap))
            hooks.enter_context(handle)
        with batch.autocast.context():
            model(*batch.args, **batch.kwargs)
    return found
