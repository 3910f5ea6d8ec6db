"""Running a forward pass of the user's model so that training cannot tell it ever happened."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_own_passes = threading.local()


def is_own_pass() -> bool:
    """Return whether this thread is within `undisturbed`: a forward pass now is ours, not the user's."""
    return bool(getattr(_own_passes, "depth", 0))


@contextmanager
def undisturbed(model: nn.Module, *, gradients: bool = False, keeps_modes: bool = False) -> Iterator[None]:
    """Put the model in inference mode for the block and leave no trace behind.

    Restored afterwards, also when the block raises: the attributes of every submodule, its mode
    among them (set directly, since a user's own `train` may do more than set it), every buffer that
    the pass changed or replaced, and the random state. Forward hooks are silent: they may collect
    what they see. Pre-hooks run, since some compute weights. Nothing is compiled, so that
    hooks fire. The fused inference path of `nn.TransformerEncoder` is off: it calls no submodule, so no tap would.
    The attention of cuDNN is off too, also with `keeps_modes`, where another may take its place: it makes a plan for
    each new shape, and a pass of ours often has a shape of its own. On an H100 the first took 1.8 s, later ones 0.15 s.

    Args:
        model: the model to run.
        gradients: whether the block records an autograd graph.
        keeps_modes: leave modes and fused paths as they are, so that the model is called as in training.
    """
    modules = list(model.modules())
    attributes = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    buffers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in model.buffers()]
    learning = _learning_buffers(modules) if keeps_modes else set()
    fused = torch.backends.mha.get_fastpath_enabled()
    attention: Any = torch.backends.cuda
    plans = attention.cudnn_sdp_enabled()
    _own_passes.depth = getattr(_own_passes, "depth", 0) + 1
    try:
        torch.backends.mha.set_fastpath_enabled(fused and keeps_modes)
        if _has_other_attention():
            attention.enable_cudnn_sdp(False)
        for module in modules:
            module.__dict__["training"] = module.training and keeps_modes
            module.__dict__["_forward_hooks"] = OrderedDict()
            if not keeps_modes:
                module.__dict__["_compiled_call_impl"] = None
        with kept_random_state(model), torch.set_grad_enabled(gradients):
            yield
    finally:
        _own_passes.depth -= 1
        torch.backends.mha.set_fastpath_enabled(fused)
        attention.enable_cudnn_sdp(plans)
        for module, before, own_buffers in attributes:
            restore_table(vars(module), before)
            restore_table(module._buffers, own_buffers)
        with torch.no_grad():
            for buffer, version, saved in buffers:
                if id(buffer) in learning:
                    buffer.data.copy_(saved)  # `data`: a graph of the user's that waits for its backward saved it
                elif buffer._version != version:
                    buffer.copy_(saved)


@contextmanager
def kept_random_state(model: nn.Module) -> Iterator[None]:
    """Restore the random states of Python, numpy and torch, on the CPU and the model's devices, after the block."""
    before = RandomState.current()
    try:
        with torch.random.fork_rng(devices=_accelerators(model)):
            yield
    finally:
        before.set()


@dataclass(frozen=True, slots=True)
class RandomState:
    """The random states of Python, numpy and torch on the CPU."""

    of_python: Any
    of_numpy: Any
    of_torch: Tensor

    @classmethod
    def current(cls) -> RandomState:
        """Return them as they are."""
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def set(self) -> None:
        """Go on from here: a model that draws random numbers in inference mode draws the same again."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        torch.set_rng_state(self.of_torch)


def seed_random_state(model: nn.Module, seed: int) -> None:
    """Begin all random numbers anew: those of Python, numpy and torch, on the CPU and the model's devices alone."""
    random.seed(seed)
    np.random.seed(seed)
    for generator in _generators(model):
        generator.manual_seed(seed)


def random_fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Return a value that changes with every random number that Python, numpy or torch draw."""
    of_numpy: Any = np.random.get_state(legacy=False)
    of_torch = tuple(generator.get_state().numpy().tobytes() for generator in _generators(model))
    key, position = of_numpy["state"]["key"].tobytes(), of_numpy["state"]["pos"]
    return (random.getstate(), key, position, of_numpy["has_gauss"], of_numpy["gauss"], *of_torch)


def generators_of_accelerators(model: nn.Module) -> list[torch.Generator]:
    """Return what random numbers come from on the accelerators that a model is on."""
    return [torch.cuda.default_generators[index] for index in _accelerators(model)]


def _generators(model: nn.Module) -> list[torch.Generator]:
    return [torch.default_generator, *generators_of_accelerators(model)]


def _learning_buffers(modules: list[nn.Module]) -> set[int]:
    """Return the buffers of modules in training mode: batch normalisation moves its own without counting versions."""
    return {id(buffer) for module in modules if module.training for buffer in module._buffers.values()}


def _has_other_attention() -> bool:
    """Return whether there is another than that of cuDNN, as thrifty, and one that takes what that does not."""
    cuda: Any = torch.backends.cuda
    return bool(cuda.math_sdp_enabled() and (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled()))


def restore_table(table: dict[str, Any], before: dict[str, Any]) -> None:
    """Give a table the entries that it had before."""
    for name in table.keys() - before.keys():
        del table[name]
    table.update(before)


def _accelerators(model: nn.Module) -> list[int]:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    return sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})
