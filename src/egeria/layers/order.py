"""In which order submodules run: recorded by hooks that leave no trace."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from egeria import tree
from egeria.layers.batch import Batch
from egeria.layers.gradients import GradientUse
from egeria.layers.shards import is_sharded
from egeria.layers.undisturbed import undisturbed

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CallOrder:
    """Which submodules one forward pass called, and in which order; knows no recorder, which may be
    abandoned.
    """

    returned_to: set[str] = field(default_factory=set)
    """The names called again after another one was: the forward pass is no chain there."""
    without_grad: set[str] = field(default_factory=set)
    """The names of what learns, yet ran without gradient only in a pass with one: reentrant
    checkpointing."""
    graph: GraphWalk = field(default_factory=lambda: GraphWalk({}))
    """What the autograd graph of the pass showed."""
    gradients: GradientUse = field(default_factory=lambda: GradientUse({}))
    """What the loop did with gradients of parameters meanwhile."""
    in_training: bool = False
    """Whether only a pass in training mode and with gradients counts: in others nothing is
    checkpointed."""
    _names: dict[str, None] = field(default_factory=dict)
    _with_grad: set[str] = field(default_factory=set)
    _last: str = ""
    _has_grad: bool = False
    _counts: bool = True
    is_complete: bool = False

    @property
    def uses(self) -> dict[str, list[str]]:
        """For each parameter the submodules in which, or on the way to which, it was used; "" is
        behind all of them.

        What has a gradient, and is in no graph of the pass, was used behind it, in the loss.
        """
        found = {name: list(places) for name, places in self.graph.uses.items()}
        others = [name for name in self.gradients.names if name not in found]
        is_known = self.graph.is_read and not self.graph.checkpointed and len(others) < len(found)
        return found | {name: [""] for name in others if is_known}

    @property
    def order(self) -> tuple[str, ...]:
        """The names called so far, in the order of their first call.

        Submodules without parameters stand where they were called last: a dropout layer that a
        model uses at both ends may be switched off only when everything that it serves is frozen.
        """
        return tuple(self._names)

    # Hooks are methods, not closures: a watched model must still pickle and deepcopy.

    def begin(self, model: nn.Module, _inputs: object) -> None:
        """Forget a pass that was not completed."""
        if not self.is_complete:
            self._forget()
            self._has_grad = torch.is_grad_enabled()
            self._counts = not self.in_training or (self._has_grad and model.training)

    def complete(self, _model: nn.Module, _inputs: object, output: object) -> None:
        """Note no more calls, if this pass counts."""
        if self._counts and not self.is_complete:
            self.graph.look("", output)
            self.graph.end()
            self.is_complete = True
        elif not self.is_complete:
            self._forget()

    def note(self, name: str, module: nn.Module, _inputs: object) -> None:
        """Note the call of a submodule."""
        if self.is_complete:
            return
        parameters = list(module.parameters())
        if not parameters:
            self._names.pop(name, None)
        else:
            if name in self._names and not _are_nested(name, self._last):
                self.returned_to.add(name)
            if self._has_grad and any(entry.requires_grad for entry in parameters):
                (self._with_grad if torch.is_grad_enabled() else self.without_grad).add(name)
                self.without_grad -= self._with_grad  # such as what a teacher's pass calls too
            self._last = name
        self._names[name] = None

    def look(self, place: str, _module: nn.Module, _inputs: object, output: object) -> None:
        """Look at the graph of what a submodule put out."""
        if not self.is_complete and self._has_grad:
            self.graph.look(place, output)

    def _forget(self) -> None:
        for noted in (self._names, self.returned_to, self.without_grad, self._with_grad):
            noted.clear()
        self.graph.forget()


class GraphWalk:
    """Walks the autograd graph of a forward pass back from the outputs of its submodules, through
    each node once.

    Args:
        names: those of the parameters, by their identity.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._seen: set[Any] = set()
        self.uses: dict[str, dict[str, None]] = {}
        """For each parameter the submodules in which, or on the way to which, it was used; "":
        behind all of them."""
        self.checkpointed: set[str] = set()
        """The submodules in which, or on the way to which, reentrant activation checkpointing was
        used."""
        self.is_read = True
        """Whether all of the graph could be walked through."""

    def look(self, place: str, output: object) -> None:
        """Note what is new in the graph of what a submodule, or the model (""), put out; nothing in
        compiled code.
        """
        if torch.compiler.is_compiling():
            self.is_read = False
            return
        try:
            tensors = [entry for _, entry in tree.contents(output) if isinstance(entry, Tensor)]
            todo: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
            while todo:
                todo += self._step(todo.pop(), place)
        except Exception:  # in the forward pass of the loop: outputs of the user's own
            self.is_read = False
            logger.debug("the graph of %r was not read", place, exc_info=True)

    def end(self) -> None:
        """Let go of the graph."""
        self._seen = set()

    def forget(self) -> None:
        """Forget what was seen."""
        self._seen, self.uses, self.checkpointed, self.is_read = set(), {}, set(), True

    def _step(self, node: Any, place: str) -> list[Any]:
        """Note what a node uses; return where to go on."""
        if node in self._seen:
            return []
        self._seen.add(node)
        if "CheckpointFunction" in node.name():
            self.checkpointed.add(place)
        found = [following for following, _ in node.next_functions if following is not None]
        for name in filter(None, map(self._parameter, found)):
            self.uses.setdefault(name, {})[place] = None
        return [following for following in found if not hasattr(following, "variable")]

    def _parameter(self, node: Any) -> str | None:
        """Return the name of the parameter whose gradient a node adds up, also in the number format
        of autocast.
        """
        if node.name().startswith("ToCopy") and node.next_functions[0][0] is not None:
            node = node.next_functions[0][0]
        return self._names.get(id(node.variable)) if hasattr(node, "variable") else None


class OrderRecorder:
    """Notes which submodules one forward pass calls, and in which order.

    Works beside the user's own training loop; also a context manager, which gives the `CallOrder`.
    The first call of the model that completes is what counts: one that fails is forgotten, and what
    comes later is not looked at. Where the model itself is never called, every call of its
    submodules counts.

    The hooks go when the recorder is closed or collected, whichever comes first.

    Args:
        model: the model that will run.
        names: dotted names of the submodules to watch; a wrong one is an `AttributeError`, and
            leaves no hook behind.
        in_training: only a call in training mode and with gradients counts.
    """

    def __init__(
        self, model: nn.Module, names: Iterable[str], *, in_training: bool = False
    ) -> None:
        submodules, parameters = (
            {name: model.get_submodule(name) for name in names},
            dict(model.named_parameters()),
        )
        walk = GraphWalk({id(parameter): name for name, parameter in parameters.items()})
        watched = parameters if in_training and not is_sharded(model) else {}
        use = GradientUse(watched)
        self._calls = calls = CallOrder(graph=walk, gradients=use, in_training=in_training)
        handles = [*use.handles, model.register_forward_pre_hook(calls.begin)]
        handles += [model.register_forward_hook(calls.complete)]
        looked_at = [
            (name, sub)
            for name, sub in submodules.items()
            if next(sub.parameters(), None) is not None
        ]
        handles += [sub.register_forward_hook(partial(calls.look, name)) for name, sub in looked_at]
        handles += [
            sub.register_forward_pre_hook(partial(calls.note, name))
            for name, sub in submodules.items()
        ]
        self.close = weakref.finalize(self, _remove, handles)
        """Removes the hooks; what was recorded stays readable. Closing twice is fine."""

    @property
    def called_alone(self) -> tuple[str, ...]:
        """The names of the submodules that were called so far, the model itself never."""
        return () if self._calls.is_complete else self._calls.order

    def record(self) -> CallOrder | None:
        """Return what was recorded, and close; None if there was no forward pass yet."""
        if not self._calls.order and not self._calls.is_complete:
            return None
        self.close()
        return self._calls

    def __enter__(self) -> CallOrder:
        return self._calls

    def __exit__(self, *exception: object) -> None:
        self.close()


class OrderOfBatch:
    """Notes the same as an `OrderRecorder`, from a forward pass of its own: hooks do not fire in
    compiled code.

    `keep_next` takes what is to be handed the batch of the coming training forward, and None to
    stop that.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str],
        keep_next: Callable[[Callable[[Batch], None] | None], None],
    ) -> None:
        self._model, self._names, self._keep_next = model, tuple(names), keep_next
        self._batch: Batch | None = None
        keep_next(self._keep)

    @property
    def called_alone(self) -> tuple[str, ...]:
        """Nothing: hooks of submodules do not fire."""
        return ()

    def record(self) -> CallOrder | None:
        """Return what was recorded; None if there was no training forward yet."""
        if self._batch is None:
            return None
        batch, self._batch = self._batch.first_rows(None), None
        with (
            undisturbed(self._model, gradients=True),
            OrderRecorder(self._model, self._names) as calls,
            batch.autocast.context(),
        ):
            self._model(*batch.args, **batch.kwargs)
        return calls

    def close(self) -> None:
        """Let go of the batch."""
        self._keep(None)

    def _keep(self, batch: Batch | None) -> None:
        self._keep_next(None)
        self._batch = batch


def _are_nested(name: str, other: str) -> bool:
    """Return whether one of two submodules is, or lies inside, the other."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.")


def merge_order(names: Sequence[str], called: Sequence[str]) -> tuple[str, ...]:
    """Sort `names` as in `called`; those that are not in it stay behind their predecessor."""
    ranks = {name: rank for rank, name in enumerate(called)}
    keys: dict[str, int] = {}
    rank = -1
    for name in names:
        keys[name] = rank = ranks.get(name, rank)
    return tuple(sorted(names, key=lambda name: (keys[name], name not in ranks)))


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
