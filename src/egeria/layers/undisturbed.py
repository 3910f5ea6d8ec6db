"""Running a forward pass of the user's model so that training cannot tell it ever happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put the model in inference mode for the block and leave no trace behind.

    Restored afterwards, also when the block raises: the mode of every submodule (set directly,
    since a user's own `train` may do more than set it), the random state of the CPU and of the
    model's devices, and every buffer that the pass changed. No gradient is recorded. The fused
    inference path of `nn.TransformerEncoder` is off: it calls no submodule, so no tap would fire.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers()]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for module, _ in modes:
            module.training = False
        with torch.random.fork_rng(devices=_accelerators(model)), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, version, saved in buffers:
                if buffer._version != version:
                    buffer.copy_(saved)


def _accelerators(model: nn.Module) -> list[int]:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    return sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})
