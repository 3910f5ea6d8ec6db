"""Passes of our own: their batch, and how they leave no trace in the training."""

import gc
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from egeria import tree
from egeria.distributed.ranks import world_size
from egeria.random_state import Generator, kept_random_state, restoring

OF_THE_LOSS = "num_items_in_batch"  # by which transformers divide the loss of an optimizer step
KEPT = (
    "its forward pass keeps tensors outside of the model (such as auxiliary losses in a list), and "
    "a pass of our own would add to them"
)
_own_passes = threading.local()
# By model: calls that restore what an unfinished pass of ours may have changed.
_unfinished: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_OURS = ("torch.", "egeria.", "builtins.", "functools.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Autocast:
    """The mixed-precision setting of a forward pass."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def current(cls, device_type: str) -> "Autocast":
        """Return the setting in force for a type of device."""
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)
        return cls(device_type=device_type, enabled=enabled, dtype=dtype)

    def context(self) -> torch.autocast:
        """Return a context with this setting."""
        # No cache: in training no weights may be found that were cast without gradients.
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Arguments of a call of the model; tensors are shared with the caller, not copied."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: Autocast

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_type: str) -> "Batch":
        """Return the arguments and the mixed-precision setting of the current call."""
        return cls(args=args, kwargs=kwargs, autocast=Autocast.current(device_type))

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments as one tree."""
        return self.args, dict(self.kwargs)

    @property
    def contents(self) -> list[tuple[str, Any]]:
        """Tensors and plain values, except the loss's, with their paths in `arguments`, sorted."""
        found = (entry for entry in tree.contents(self.arguments) if OF_THE_LOSS not in entry[0])
        return sorted(found, key=itemgetter(0))

    def first_rows(self, count: int | None) -> "Batch":
        """Return a detached copy, of the first `count` samples if given and if they can be cut."""
        args, kwargs = tree.map_tensors(Tensor.detach, self.arguments)
        of_the_loss = {name: kwargs.pop(name) for name in (OF_THE_LOSS,) if name in kwargs}
        if count is not None:
            args, kwargs = tree.take_rows((args, kwargs), count)
        args, kwargs = tree.map_tensors(torch.clone, (args, {**kwargs, **of_the_loss}))
        return replace(self, args=args, kwargs=kwargs)

    def on(self, device: str) -> "Batch":
        """Return the same with its tensors on a device."""
        args, kwargs = tree.map_tensors(lambda tensor: tensor.to(device), self.arguments)
        return replace(self, args=args, kwargs=kwargs)


def is_own_pass() -> bool:
    """Return whether this thread is within `undisturbed`: a pass now is not the user's."""
    return bool(getattr(_own_passes, "is_on", False))


class TapReachedError(BaseException):
    """Ends a forward pass that has run far enough; models do not catch it."""


@contextmanager
def undisturbed(model: nn.Module, *, as_training: bool = False) -> Iterator[None]:
    """Put the model in inference mode for the block, and leave no trace.

    The block works on copies of buffers and of attributes that are tensors or containers. Restored
    afterwards, also when it raises: attributes and modes of all submodules, the random state,
    generators, and weights that were given other memory (`weight.data = ...`). Forward hooks do not
    run, since they may collect what they see; pre-hooks do, since some compute weights. Nothing is
    compiled. The fused path of `nn.TransformerEncoder`, which calls no submodule, is off, and so is
    cuDNN's attention if another kernel can replace it: on an H100 it takes 1.8 s for its first plan
    and 0.15 s for each new shape.

    Args:
        model: the model to run.
        as_training: leave modes, gradients and fused paths as they are in training.

    Raises:
        RuntimeError: the block communicates with other ranks, which do not take part.
    """
    finish(model)
    modules, fused = list(model.modules()), torch.backends.mha
    cuda: Any = torch.backends.cuda
    has_other = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled()
    try:
        _unfinished[model] = _undoing(modules)
        _own_passes.is_on = True
        _give_copies(modules)
        fused.set_fastpath_enabled(fused.get_fastpath_enabled() and as_training)
        if has_other and cuda.math_sdp_enabled():
            cuda.enable_cudnn_sdp(False)
        for module in modules:
            # Not by `train`, since one of the user's own may do more.
            vars(module)["training"] = module.training and as_training
            vars(module)["_forward_hooks"] = OrderedDict()
            if not as_training:
                vars(module)["_compiled_call_impl"] = None
        alone: Any = _Alone() if world_size() > 1 else nullcontext()  # type: ignore[no-untyped-call]
        with kept_random_state(model), torch.set_grad_enabled(as_training), alone:
            yield
    finally:
        finish(model)


def finish(model: nn.Module) -> None:
    """Restore what an interrupted `undisturbed` has not restored; mostly there is nothing."""
    for undo in _unfinished.get(model, ()):
        undo()
    _unfinished.pop(model, None)


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at operations that wait for other ranks, which do not take part."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, unless it communicates with other ranks."""
        if getattr(func, "namespace", "").startswith(("c10d", "_c10d")):
            raise RuntimeError(
                f"the forward pass of the model communicates between processes ({func}), and a "
                "pass of one process alone, by which layers are judged, would wait for the others. "
                "Let the model communicate in its loss, outside of forward"
            )
        return func(*args, **(kwargs or {}))


def _undoing(modules: Sequence[nn.Module]) -> list[Callable[[], object]]:
    """Return calls that restore all that a pass may change: submodules, and switches of torch."""
    cuda: Any = torch.backends.cuda
    fused = torch.backends.mha
    undo: list[Callable[[], object]] = [
        partial(setattr, _own_passes, "is_on", is_own_pass()),
        partial(fused.set_fastpath_enabled, fused.get_fastpath_enabled()),
        partial(cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled()),
    ]
    for module in modules:
        own = vars(module)
        undo += [partial(restore_table, table, dict(table)) for table in (own, module._buffers)]
        undo += [restoring(value) for value in own.values() if isinstance(value, Generator)]
        plain = [entry for entry in module._parameters.values() if type(entry) is nn.Parameter]
        undo += [partial(_restore_memory, e, e.data) for e in plain if e.layout is torch.strided]
    return undo


def _give_copies(modules: Sequence[nn.Module]) -> None:
    """Give submodules copies of their tensors and containers, for a pass to change."""
    copies: dict[int, Any] = {}  # by identity, so that shared values stay shared
    for table in (table for module in modules for table in (vars(module), module._buffers)):
        for name in table.keys() - _OF_MODULES:
            value: Any = table[name]
            if isinstance(value, Tensor):
                table[name] = copies.setdefault(id(value), value.detach().clone())
            elif type(value) in _CONTAINERS:
                table[name] = copies.setdefault(id(value), value.copy())


def _restore_memory(weight: nn.Parameter, memory: Tensor) -> None:
    if weight.data_ptr() != memory.data_ptr():
        weight.data = memory


def restore_table(table: dict[str, Any], before: dict[str, Any]) -> None:
    """Give a table the entries that it had before."""
    for name in table.keys() - before.keys():
        del table[name]
    table.update(before)


def captures(model: nn.Module, taps: Sequence[str], batch: Batch) -> dict[str, Tensor]:
    """Return the activations [B, ...] of submodules for the batch; the model runs no further.

    Each is the first floating-point tensor of two dimensions or more that the first call returns,
    detached. Submodules without one are left out.
    """
    missing, found = set(taps), dict[str, Tensor]()

    def keep(tap: str, _module: nn.Module, _args: Any, output: Any) -> None:
        activation = tree.first_activation(output)
        if activation is not None and tap in missing:
            # A copy, since what follows may write to it.
            found[tap] = activation.detach().clone() if len(missing) > 1 else activation.detach()
        missing.discard(tap)
        if not missing:
            raise TapReachedError

    with ExitStack() as hooks, suppress(TapReachedError), batch.autocast.context():
        for tap in taps:
            hooks.enter_context(model.get_submodule(tap).register_forward_hook(partial(keep, tap)))
        model(*batch.args, **batch.kwargs)
    return found


def living() -> set[int]:
    """Return the ids of all tensors that exist now."""
    return {id(entry) for entry in gc.get_objects() if type(entry) is Tensor}


def keeps_outside(model: nn.Module, output: Any, before: set[int]) -> bool:
    """Return whether something outside of the model keeps tensors of a pass that has just ended.

    What it returns, what its graph holds and attributes of the model do not count, since a pass of
    ours leaves none of these. Nor do tensors without gradients, such as batches of a thread.

    Args:
        model: the model.
        output: what the pass has returned.
        before: what `living` returned at its beginning.
    """
    known = before.union(map(id, tree.tensors(output)))
    made = (entry for entry in gc.get_objects() if type(entry) is Tensor and entry.requires_grad)
    found = [entry for entry in made if id(entry) not in known]
    inside = {id(output), id(found)}
    for module in model.modules():
        inside |= {id(module), id(vars(module)), *map(id, vars(module).values())}
    holders = gc.get_referrers(*found) if found else []
    return any(id(holder) not in inside and _is_outside(holder) for holder in holders)


def _is_outside(holder: Any) -> bool:
    """Return whether it is a container, or an object of a class of the user's.

    Attributes of the user's autograd functions are in the graph, and the named arguments of what a
    checkpoint will recompute are in a `partial`.
    """
    kind, graph = type(holder), (partial, BackwardCFunction)
    if kind is dict and any(isinstance(owner, graph) for owner in gc.get_referrers(holder)):
        return False
    return kind in _CONTAINERS or not f"{kind.__module__}.".startswith(_OURS)
