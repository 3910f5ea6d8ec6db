"""Running a forward pass of the user's model so that training cannot tell it ever happened."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from egeria import tree
from egeria.distributed.ranks import world_size
from egeria.model.batch import Batch
from egeria.random_state import Generator, kept_random_state, restoring

KEPT = (
    "its forward pass keeps tensors outside of the model (such as auxiliary losses in a list), and "
    "a pass of our own would add to them"
)
_own_passes = threading.local()
_unfinished: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""By model: what a pass of ours under way is to restore."""
_OF_MODULES = frozenset(vars(nn.Module()))  # attributes that every module has
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_OURS = ("torch.", "egeria.", "builtins.", "functools.")


def is_own_pass() -> bool:
    """Return whether this thread is within `undisturbed`: a forward pass now is not the user's."""
    return bool(getattr(_own_passes, "depth", 0))


class TapReachedError(BaseException):
    """Ends a forward pass that has run far enough; no handler in a model swallows it."""


@contextmanager
def undisturbed(model: nn.Module, *, as_training: bool = False) -> Iterator[None]:
    """Put the model in inference mode for the block and leave no trace behind.

    The block has copies of buffers, and of attributes that are tensors or containers. Restored
    afterwards, also when it raises: the attributes of every submodule with its mode, random
    generators, weights that were given other memory (`weight.data = ...`), and the random state.
    Forward hooks are silent: they may collect what they see. Pre-hooks run, since some compute
    weights. Nothing is compiled, and the fused path of `nn.TransformerEncoder`, which calls no
    submodule, is off. So is the attention of cuDNN where another can take its place, in any mode:
    it makes a plan for each new shape, the first in 1.8 s and later ones in 0.15 s on an H100.

    Args:
        model: the model to run.
        as_training: leave modes, gradients and fused paths as they are in training.

    Raises:
        RuntimeError: the block communicates with other processes of the job, which take no part in
            it.
    """
    finish(model)
    modules = list(model.modules())
    before = _Before(modules)
    cuda: Any = torch.backends.cuda
    thrifty = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled()
    try:
        _unfinished[model] = before
        _own_passes.depth = before.depth + 1
        before.put_copies()
        torch.backends.mha.set_fastpath_enabled(before.fused and as_training)
        cuda.enable_cudnn_sdp(before.plans and not (thrifty and cuda.math_sdp_enabled()))
        for module in modules:
            # Not by `train`, since one of the user's own may do more.
            vars(module)["training"] = module.training and as_training
            vars(module)["_forward_hooks"] = OrderedDict()
            if not as_training:
                vars(module)["_compiled_call_impl"] = None
        with kept_random_state(model), torch.set_grad_enabled(as_training), ExitStack() as alone:
            if world_size() > 1:
                alone.enter_context(_Alone())  # type: ignore[no-untyped-call]
            yield
    finally:
        finish(model)


def finish(model: nn.Module) -> None:
    """Restore what an interrupt has kept `undisturbed` from restoring; mostly there is nothing."""
    before = _unfinished.get(model)
    if before is not None:
        before.restore()
        del _unfinished[model]


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets no operation wait for other processes: none of them takes part."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of one process."""
        if getattr(func, "namespace", "").startswith(("c10d", "_c10d")):
            raise RuntimeError(
                f"the forward pass of the model communicates between processes ({func}), and a "
                "pass of one process alone, by which layers are judged, would wait for the others. "
                "Let the model communicate in its loss, outside of forward"
            )
        return func(*args, **(kwargs or {}))


class _Before:
    """What a forward pass may change of a model with these submodules, as it is now."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        cuda: Any = torch.backends.cuda
        self.fused, self.plans = torch.backends.mha.get_fastpath_enabled(), cuda.cudnn_sdp_enabled()
        self.depth = getattr(_own_passes, "depth", 0)
        self._tables = [(t, dict(t)) for m in modules for t in (vars(m), m._buffers)]
        weights = {weight for module in modules for weight in module._parameters.values()}
        plain = [entry for entry in weights if type(entry) is nn.Parameter]
        self._weights = [(e, e.data) for e in plain if e.layout is torch.strided]
        self._restore_generators: list[Callable[[], object]] = []

    def put_copies(self) -> None:
        """Give the submodules copies of tensors and containers, for a pass to change."""
        copies: dict[int, Any] = {}  # by identity: what some share they go on to share
        for table, before in self._tables:
            for name in before.keys() - _OF_MODULES:
                value = before[name]
                if isinstance(value, Generator):
                    self._restore_generators.append(restoring(value))
                elif isinstance(value, Tensor) or type(value) in _CONTAINERS:
                    if id(value) not in copies:
                        is_tensor = isinstance(value, Tensor)
                        copies[id(value)] = value.detach().clone() if is_tensor else value.copy()
                    table[name] = copies[id(value)]

    def restore(self) -> None:
        """Give the model back what it had, and the switches of torch; can be called again."""
        cuda: Any = torch.backends.cuda
        _own_passes.depth = self.depth
        torch.backends.mha.set_fastpath_enabled(self.fused)
        cuda.enable_cudnn_sdp(self.plans)
        for table, before in self._tables:
            restore_table(table, before)
        for restore in self._restore_generators:
            restore()
        for weight, memory in self._weights:
            if weight.data_ptr() != memory.data_ptr():
                weight.data = memory


def restore_table(table: dict[str, Any], before: dict[str, Any]) -> None:
    """Give a table the entries that it had before."""
    for name in table.keys() - before.keys():
        del table[name]
    table.update(before)


def capture(model: nn.Module, tap: str, batch: Batch) -> Tensor | None:
    """Return what `captures` gives for one submodule, None if it gives nothing."""
    return captures(model, [tap], batch).get(tap)


def captures(model: nn.Module, taps: Sequence[str], batch: Batch) -> dict[str, Tensor]:
    """Return the activations [B, ...] of submodules for the batch, running the model no further.

    That is the first floating-point tensor of two dimensions or more that each gives when it is
    called first, detached; those that give none are left out.
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
    known = before.union(map(id, tree.tensors(output)))
    made = (entry for entry in gc.get_objects() if type(entry) is Tensor and entry.requires_grad)
    found = [entry for entry in made if id(entry) not in known]
    inside = {id(output), id(found)}
    for module in model.modules():
        values = vars(module).values()
        inside |= {id(module), id(vars(module)), id(module._buffers), *map(id, values)}
    holders = gc.get_referrers(*found) if found else []
    return any(id(holder) not in inside and _is_outside(holder) for holder in holders)


def _is_outside(holder: Any) -> bool:
    """Return whether it is a container, or an object of a class of the user's.

    The graph holds attributes of functions of the user's, and checkpoints the arguments of what
    they compute anew, those by name in a `partial`.
    """
    kind, graph = type(holder), (partial, BackwardCFunction)
    if kind is dict and any(isinstance(owner, graph) for owner in gc.get_referrers(holder)):
        return False
    return kind in _CONTAINERS or not f"{kind.__module__}.".startswith(_OURS)
