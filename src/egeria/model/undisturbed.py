"""Running a forward pass of the user's model so that training cannot tell it ever happened."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from egeria import dist, tree
from egeria.model.batch import Batch
from egeria.random_state import Generator, kept_random_state, restoring

_own_passes = threading.local()
_unfinished: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""By model: what a pass of ours under way is to restore."""
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
    """What a forward pass may change of a model, as it is now, and the switches of torch.

    Args:
        modules: all of the model.
        learning: identities of buffers that may change without a trace.
    """

    def __init__(self, modules: Sequence[nn.Module], learning: Collection[int]) -> None:
        self._learning = learning
        self._fused = torch.backends.mha.get_fastpath_enabled()
        self._plans = cast(Any, torch.backends.cuda).cudnn_sdp_enabled()
        self._depth = getattr(_own_passes, "depth", 0)
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

    def restore(self) -> None:
        """Give the model back what it had; can be called again."""
        _own_passes.depth = self._depth
        torch.backends.mha.set_fastpath_enabled(self._fused)
        torch.backends.cuda.enable_cudnn_sdp(self._plans)
        for module, before, buffers in self._attributes:
            restore_table(vars(module), before)
            restore_table(module._buffers, buffers)
        with torch.no_grad():
            for tensor, version, saved in self._tensors:
                if id(tensor) in self._learning:
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
    finish(model)
    modules = list(model.modules())
    before = _Before(modules, _learning_buffers(modules) if keeps_modes else set())
    fused, attention = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda
    try:
        _unfinished[model] = before
        _own_passes.depth = getattr(_own_passes, "depth", 0) + 1
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
        finish(model)


def finish(model: nn.Module) -> None:
    """Restore what an interrupt has kept `undisturbed` from restoring; mostly there is nothing."""
    before = _unfinished.get(model)
    if before is not None:
        before.restore()
        del _unfinished[model]


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


class TapReachedError(BaseException):
    """Ends a forward pass that has run far enough; a BaseException, so that no handler in a model
    swallows it.
    """


def capture(model: nn.Module, tap: str, batch: Batch) -> Tensor | None:
    """Return the activation of submodule `tap` for the batch, running the model no further than it.

    That is the first floating-point tensor of its output [B, ...], detached; None if it was not
    called or has none.
    """
    captured: list[Any] = []

    def stop(_module: nn.Module, _args: Any, output: Any) -> None:
        captured.append(output)
        raise TapReachedError

    handle = model.get_submodule(tap).register_forward_hook(stop)
    try:
        with batch.autocast.context():
            model(*batch.args, **batch.kwargs)
    except TapReachedError:
        pass
    finally:
        handle.remove()
    activation = tree.first_activation(captured)
    return None if activation is None else activation.detach()


KEPT = (
    "its forward pass keeps tensors outside of the model (such as auxiliary losses in a list), and "
    "a pass of our own would add to them"
)
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_OURS = ("torch.", "egeria.", "builtins.", "functools.")


def living() -> set[int]:
    """Return the identities of all tensors that there are now."""
    return {id(entry) for entry in gc.get_objects() if type(entry) is Tensor}


def keeps_outside(model: nn.Module, output: Any, before: set[int]) -> bool:
    """Return whether tensors made in a pass that has just ended are kept for somebody.

    What it returns, what its graph holds, and attributes of the model do not count: a pass of ours
    leaves none of these. Nor do tensors without gradients, such as batches that a thread makes.

    Args:
        model: the model.
        output: what the pass has returned.
        before: what `living` gave when it began.
    """
    known = before.union(id(entry) for _, entry in tree.contents(output))
    made = (entry for entry in gc.get_objects() if type(entry) is Tensor and entry.requires_grad)
    found: Any = [entry for entry in made if id(entry) not in known]
    inside = {id(output), id(found)}
    for module in model.modules():
        values = vars(module).values()
        inside |= {id(module), id(vars(module)), id(module._buffers), *map(id, values)}
    for _ in range(2):  # kept as they are, or in tuples
        holders = gc.get_referrers(*found) if found else []
        inside.add(id(holders))
        if any(id(holder) not in inside and _is_outside(holder) for holder in holders):
            return True
        found = [holder for holder in holders if type(holder) is tuple]
        inside.add(id(found))
    return False


def _is_outside(holder: Any) -> bool:
    """Return whether it is a container, or an object of a class of the user's.

    The graph holds attributes of functions of the user's, and checkpoints the arguments of what
    they compute anew, those by name in a `partial`.
    """
    kind, graph = type(holder), (partial, BackwardCFunction)
    if kind is dict and any(isinstance(owner, graph) for owner in gc.get_referrers(holder)):
        return False
    return kind in _CONTAINERS or not f"{kind.__module__}.".startswith(_OURS)
