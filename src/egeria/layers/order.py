"""In which order submodules run: recorded by hooks that leave no trace."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from egeria.layers.batch import Batch
from egeria.layers.undisturbed import undisturbed


class OrderRecorder:
    """Notes which submodules one forward pass calls, and in which order.

    Works beside the user's own training loop; also a context manager. The first call of the model that
    completes is what counts: one that fails is forgotten, and what comes later is not looked at. Where
    the model itself is never called, every call of its submodules counts.

    The hooks go when the recorder is closed or collected, whichever comes first.

    Args:
        model: the model that will run.
        names: dotted names of the submodules to watch; a wrong one is an `AttributeError`, and leaves no hook behind.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._log = log = _Log()
        submodules = {name: model.get_submodule(name) for name in names}
        handles = [model.register_forward_pre_hook(partial(_begin, log))]
        handles.append(model.register_forward_hook(partial(_complete, log)))
        for name, submodule in submodules.items():
            note = _note_call if any(True for _ in submodule.parameters()) else _note_last_call
            handles.append(submodule.register_forward_pre_hook(partial(note, log, name)))
        self.close = weakref.finalize(self, _remove, handles)
        """Removes the hooks; what was recorded stays readable. Closing twice is fine."""

    @property
    def order(self) -> tuple[str, ...]:
        """The names called so far, in the order of their first call.

        Submodules without parameters stand where they were called last: a dropout layer that a model
        uses at both ends may be switched off only when everything that it serves is frozen.
        """
        return tuple(self._log.order)

    @property
    def returned_to(self) -> frozenset[str]:
        """The names called again after another one was: the forward pass is no chain there."""
        return frozenset(self._log.returned_to)

    @property
    def without_grad(self) -> frozenset[str]:
        """The names of what learns, yet ran without gradient in a pass with one: reentrant checkpointing."""
        return frozenset(self._log.without_grad)

    def record(self) -> OrderRecorder | None:
        """Return what was recorded, closed; None if there was no forward pass yet."""
        if not self.order:
            return None
        self.close()
        return self

    def __enter__(self) -> OrderRecorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class OrderOfBatch:
    """Notes the same as an `OrderRecorder`, from a forward pass of its own: hooks do not fire in compiled code.

    `keep_next` takes what is to be handed the batch of the coming training forward, and None to stop that.
    """

    def __init__(
        self, model: nn.Module, names: Iterable[str], keep_next: Callable[[Callable[[Batch], None] | None], None]
    ) -> None:
        self._model, self._names, self._keep_next = model, tuple(names), keep_next
        self._batch: Batch | None = None
        keep_next(self._keep)

    def record(self) -> OrderRecorder | None:
        """Return what was recorded, closed; None if there was no training forward yet."""
        if self._batch is None:
            return None
        batch, self._batch = self._batch.first_rows(None), None
        with (
            undisturbed(self._model, gradients=True),
            OrderRecorder(self._model, self._names) as recorder,
            batch.autocast.context(),
        ):
            self._model(*batch.args, **batch.kwargs)
        return recorder

    def close(self) -> None:
        """Let go of the batch."""
        self._keep(None)

    def _keep(self, batch: Batch | None) -> None:
        self._keep_next(None)
        self._batch = batch


def merge_order(names: Sequence[str], called: Sequence[str]) -> tuple[str, ...]:
    """Sort `names` as in `called`; those that are not in it stay behind their predecessor."""
    ranks = {name: rank for rank, name in enumerate(called)}
    keys: dict[str, int] = {}
    rank = -1
    for name in names:
        keys[name] = rank = ranks.get(name, rank)
    return tuple(sorted(names, key=lambda name: (keys[name], name not in ranks)))


@dataclass(slots=True)
class _Log:
    """What the hooks write; it knows no recorder, so that an abandoned recorder can be collected."""

    order: dict[str, None] = field(default_factory=dict)
    last: str = ""
    returned_to: set[str] = field(default_factory=set)
    has_grad: bool = False
    without_grad: set[str] = field(default_factory=set)
    complete: bool = False


# Hooks are functions of this file, not closures: a watched model must still pickle and deepcopy.


def _begin(log: _Log, _model: nn.Module, _inputs: object) -> None:
    if not log.complete:
        log.order.clear()
        log.returned_to.clear()
        log.without_grad.clear()
        log.has_grad = torch.is_grad_enabled()


def _complete(log: _Log, _model: nn.Module, _inputs: object, _output: object) -> None:
    log.complete = True


def _note_call(log: _Log, name: str, module: nn.Module, _inputs: object) -> None:
    if not log.complete:
        if name in log.order and log.last != name:
            log.returned_to.add(name)
        learns = any(parameter.requires_grad for parameter in module.parameters())
        if learns and log.has_grad and not torch.is_grad_enabled():
            log.without_grad.add(name)
        log.last = name
        log.order[name] = None


def _note_last_call(log: _Log, name: str, _module: nn.Module, _inputs: object) -> None:
    if not log.complete:
        log.order.pop(name, None)
        log.order[name] = None


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
