"""Running a forward pass of the user's model so that training cannot tell it ever happened."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from egeria import dist
from egeria.random_state import Generator, kept_random_state, restoring

_own_passes = threading.local()
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
MOST_BYTES = 2**26
"""Of a tensor among the attributes: a larger one is not copied, and keeps what a pass of ours
writes to it."""
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


def is_own_pass() -> bool:
    """Return whether this thread is within `undisturbed`: a forward pass now is ours, not the
    user's.
    """
    return bool(getattr(_own_passes, "depth", 0))


class CommunicationError(Exception):
    """The model's forward pass talks to other processes, which do not make a pass of ours together
    with this one.
    """


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets no operation wait for other processes: none of them takes part."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of one process."""
        if getattr(func, "namespace", "").startswith(("c10d", "_c10d")):
            raise CommunicationError(
                f"the forward pass of the model communicates between processes ({func}), and a "
                "pass of one process "
                "alone, by which layers are judged, would wait for the others. Let the model "
                "communicate in its "
                f"loss, outside of forward"
            )
        return func(*args, **(kwargs or {}))


class _Before:
    """What a forward pass may change of a model, as it is now."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._attributes = [
            (module, dict(vars(module)), dict(module._buffers)) for module in modules
        ]
        held = [
            value
            for _, table, _ in self._attributes
            for name, value in table.items()
            if name not in _OF_MODULES
        ]
        self._contents = [restore for value in held if (restore := _restoring(value)) is not None]
        buffers = {
            id(entry): entry
            for module in modules
            for entry in module._buffers.values()
            if entry is not None
        }
        kept = {
            id(value): value for value in held if isinstance(value, Tensor) and _is_small(value)
        } | buffers
        tensors = [tensor for tensor in kept.values() if not tensor.is_inference()]
        self._tensors = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]
        weights = {weight for module in modules for weight in module._parameters.values()}
        plain = [
            entry
            for entry in weights
            if type(entry) is nn.Parameter and entry.layout is torch.strided
        ]
        self._weights = [(weight, weight.data) for weight in plain]

    def restore(self, learning: Collection[int]) -> None:
        """Give the model back what it had.

        Args:
            learning: identities of buffers that may have changed without a trace.
        """
        for module, before, buffers in self._attributes:
            restore_table(vars(module), before)
            restore_table(module._buffers, buffers)
        with torch.no_grad():
            for tensor, version, saved in self._tensors:
                if id(tensor) in learning:
                    tensor.data.copy_(
                        saved
                    )  # `data`: a graph of the user's that waits for its backward saved it
                elif tensor._version != version:
                    tensor.copy_(saved)
        for restore in self._contents:
            restore()
        for weight, memory in self._weights:
            if weight.data_ptr() != memory.data_ptr():
                weight.data = memory


@contextmanager
def undisturbed(
    model: nn.Module, *, gradients: bool = False, keeps_modes: bool = False
) -> Iterator[None]:
    """Put the model in inference mode for the block and leave no trace behind.

    Restored afterwards, also when the block raises: the attributes of every submodule, its mode
    among them (set directly, since a user's own `train` may do more than set it), what is in those
    that are containers or random generators, every buffer, and tensor among the attributes, that
    the pass changed or replaced, weights that it gave other memory (`weight.data = ...`), and the
    random state. Forward hooks are silent: they may collect what they see. Pre-hooks run, since
    some compute weights. Nothing is compiled, so that hooks fire. The fused inference path of
    `nn.TransformerEncoder` is off: it calls no submodule, so no tap would. The attention of cuDNN
    is off too, also with `keeps_modes`, where another may take its place: it makes a plan for each
    new shape, and a pass of ours often has a shape of its own. On an H100 the first took 1.8 s,
    later ones 0.15 s.

    Args:
        model: the model to run.
        gradients: whether the block records an autograd graph.
        keeps_modes: leave modes and fused paths as they are, so that the model is called as in
            training.

    Raises:
        CommunicationError: the block communicates with other processes of the job, which take no
            part in it.
    """
    modules = list(model.modules())
    before = _Before(modules)
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
        alone: Any = _Alone() if dist.world_size() > 1 else nullcontext()  # type: ignore[no-untyped-call]
        with kept_random_state(model), torch.set_grad_enabled(gradients), alone:
            yield
    finally:
        _own_passes.depth -= 1
        torch.backends.mha.set_fastpath_enabled(fused)
        attention.enable_cudnn_sdp(plans)
        before.restore(learning)


def _learning_buffers(modules: list[nn.Module]) -> set[int]:
    """Return the buffers of modules in training mode: batch normalisation moves its own without
    counting versions.
    """
    return {
        id(buffer) for module in modules if module.training for buffer in module._buffers.values()
    }


def _has_other_attention() -> bool:
    """Return whether there is another than that of cuDNN, as thrifty, and one that takes what that
    does not.
    """
    cuda: Any = torch.backends.cuda
    return bool(
        cuda.math_sdp_enabled() and (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled())
    )


def _is_small(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() * tensor.element_size() <= MOST_BYTES


def _restoring(value: Any) -> Callable[[], object] | None:
    """Return what gives an attribute back the contents that it has now; None for what has none that
    are known.
    """
    if isinstance(value, Generator):
        return restoring(value)
    if type(value) in _CONTAINERS:
        return partial(_refill, value, value.copy())
    return None


def _refill(container: Any, before: Any) -> None:
    """Give a container the entries that it had before."""
    container.clear()
    (container.update if isinstance(container, (set, dict)) else container.extend)(before)


def restore_table(table: dict[str, Any], before: dict[str, Any]) -> None:
    """Give a table the entries that it had before."""
    for name in table.keys() - before.keys():
        del table[name]
    table.update(before)
