"""Freezing the front of a model, and giving it back as its user would have it."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.model.group import is_under, parent_of
from egeria.model.hooks import Hook, sweep

if TYPE_CHECKING:
    from egeria.model.cut import Cut

NUM_COMPARED = 8  # parameters whose values are compared each time, for writes through `data`
_PARAMETRIZED = re.compile(r"parametrizations\.([^.]+)\.original\d*$")
_ATTRIBUTES = ("requires_grad_", "__getstate__")
_Place = tuple[dict[str, nn.Parameter | None], str]  # of a parameter: in a table, under a name
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Freezer:
    """Owns the frozen depth of one model without wrappers.

    Parameters of a frozen layer module require no gradient and hold none. Its submodules are in
    eval mode whoever calls `model.train()`, but for those that serve something that trains: a
    dropout that active blocks use too, a normalisation whose parameters are kept trainable. A layer
    module in which nothing trains keeps the modes that its owner gave it.

    What the user changes meanwhile is kept by a thaw: a call of `requires_grad_` on a frozen
    parameter, and a mode other than the model's. The assignment `parameter.requires_grad = False`
    leaves no trace there and is not seen, nor is a call on a tensor subclass (sharded parameters).
    A compiled model gets no hooks (`has_hooks`), so that nothing is detached there.
    """

    def __init__(self, model: nn.Module, cut: Cut, *, has_hooks: bool = True) -> None:
        self._model, self._cut, self._has_hooks = model, cut, has_hooks
        self._held: list[list[_Held]] = []
        self._modes: dict[nn.Module, _Train] = {}
        self._boundary: _Boundary | None = None
        self.is_whole = True  # not where a change was interrupted: `freeze_to` makes it so again

    @property
    def depth(self) -> int:
        """How many front layer modules are frozen."""
        return len(self._held)

    def freeze_to(self, depth: int, *, detaches: bool = True) -> None:
        """Freeze the first `depth` layer modules and thaw all others.

        Its output may be detached if the caller and the cut allow it. Every change is noted before
        it is made: behind an interrupt the next call, for any depth, starts from a thawed model.
        """
        kept = depth if self.is_whole else 0
        self.is_whole = False
        if self._boundary is not None:
            self._boundary.close()
        self._thaw(kept)
        now = self._parameters()
        for module in self._cut.modules[self.depth : depth]:
            names = [found for name in module.parameters for found in _find_names(name, now)]
            self._held.append([])
            for name in names:
                self._held[-1].append(_Held(name, now[name]))
                self._held[-1][-1].hold()
        self._set_modes(self._find_unused(depth) if depth else {})
        is_allowed = depth > 0 and detaches and self._cut.detaches[depth]
        if self._has_hooks and (is_allowed or (depth and self._cut.is_reentrant)):
            self._boundary = self._make_boundary(depth, is_allowed)
            self._boundary.open()
        self.is_whole = True

    def moved(self) -> list[str]:
        """Return the names of frozen parameters that were changed, replaced or switched on.

        Torch counts writes, of which those that keep the values are no change, but not writes
        through `data`: these are looked for in the few smallest parameters, as they concern all.
        """
        now, held = self._parameters(), [entry for part in self._held for entry in part]
        smallest = heapq.nsmallest(NUM_COMPARED, held, key=lambda entry: entry.parameter.numel())

        def is_other(entry: _Held) -> bool:
            return now.get(entry.name) is not entry.parameter or entry.has_moved(entry in smallest)

        return [entry.name for entry in held if is_other(entry)]

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters(remove_duplicate=False))

    def _thaw(self, depth: int) -> None:
        """Thaw what is behind `depth`, also parameters that have taken the place of frozen ones."""
        now = self._parameters() if self.depth > depth else {}
        while self.depth > depth:
            for entry in self._held[-1]:
                entry.release(now[current] for current in _find_names(entry.name, now))
            self._held.pop()

    def _set_modes(self, submodules: Mapping[nn.Module, None]) -> None:
        """Keep these submodules in eval mode, and no others."""
        for submodule in [part for part in self._modes if part not in submodules]:
            self._modes[submodule].release()
            del self._modes[submodule]
        for submodule in submodules:
            if submodule not in self._modes:
                self._modes[submodule] = _Train(submodule, self._model)
            self._modes[submodule].hold()

    def _find_unused(self, depth: int) -> dict[nn.Module, None]:
        """Return the submodules of frozen layer modules that serve nothing that trains."""
        names = [module.submodules for module in self._cut.modules]
        roots = [[self._model.get_submodule(name) for name in own] for own in names]
        front = [part for own in roots[:depth] for part in own]
        later = {part for own in roots[depth:] for root in own for part in root.modules()}
        elsewhere = {part for _, part in self._model.named_modules(memo=set(front))}

        def serves(part: nn.Module) -> bool:
            # A name elsewhere is a use of a submodule without parameters. One with parameters may
            # just have two names: the layer module that its parameters are in tells where it is.
            if part in later or any(p.requires_grad for p in part.parameters(recurse=False)):
                return True
            return part in elsewhere and next(part.parameters(), None) is None

        is_ours = [any(entry.was_active for entry in own) for own in self._held[:depth]]
        frozen = [root for index in range(depth) if is_ours[index] for root in roots[index]]
        parts = dict.fromkeys(part for root in frozen for part in root.modules())
        return {part: None for part in parts if not serves(part) and not _needs_mode(part)}

    def _make_boundary(self, depth: int, is_allowed: bool) -> _Boundary:
        modules, now = self._cut.modules, self._parameters()
        pieces = [name for own in modules for name in own.submodules]
        front = [name for own in modules[:depth] for name in own.submodules]
        later = {now.get(name) for own in modules[depth:] for name in own.parameters}

        def is_in_front(name: str) -> bool:
            around = (is_under(piece, parent_of(name)) for piece in pieces)
            return any(is_under(name, part) for part in front) or any(around)

        rest = [name for name, parameter in now.items() if parameter not in later]
        names = [name.rpartition(".") for name in rest if is_in_front(name)]
        still = [(self._model.get_submodule(owner)._parameters, name) for owner, _, name in names]
        tap = self._model.get_submodule(modules[depth - 1].tap)
        return _Boundary(self._model, tap, still if is_allowed else None, self._cut.is_reentrant)


def _needs_mode(part: nn.Module) -> bool:
    """Return whether a submodule keeps its mode, since that means more than its own layers.

    By that of quantized weights their library may pack them for inference, for good. By that of its
    first layer `nn.TransformerEncoder` hands nested tensors to all, also to those in training.
    """
    own = [p for p in part.parameters(recurse=False) if p.dim() > 1 and not hasattr(p, "to_local")]
    is_quantized = any(type(parameter) is not nn.Parameter for parameter in own)
    return is_quantized or isinstance(part, nn.TransformerEncoderLayer)


def _find_names(name: str, now: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names that a parameter has now: others where it was parametrized meanwhile."""
    if name in now:
        return [name]
    plain = _PARAMETRIZED.sub(r"\1", name)
    return [current for current in now if _PARAMETRIZED.sub(r"\1", current) == plain]


class _Held:
    """One frozen parameter; attributes on it see its `requires_grad_`, and are in no pickle."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.was_active = parameter.requires_grad  # not where the loop has switched it off
        self._is_users = not self.was_active
        self._version, self._fingerprint = _read_version(parameter), _fingerprint(parameter)

    def hold(self) -> None:
        if type(self.parameter) is nn.Parameter:
            vars(self.parameter).update(__getstate__=self._state, requires_grad_=self._set)
        if self.was_active:
            Tensor.requires_grad_(self.parameter, False)
            self.parameter.grad = None

    def release(self, successors: Iterable[nn.Parameter]) -> None:
        """Let the parameter train again, and those that have taken its place in the model."""
        if not self._is_users:
            for parameter in (self.parameter, *successors):
                if parameter.is_floating_point() or parameter.is_complex():
                    Tensor.requires_grad_(parameter, True)
        for name in _ATTRIBUTES:
            vars(self.parameter).pop(name, None)

    def has_moved(self, compares: bool) -> bool:
        """Return whether the parameter is not what it was when it was frozen."""
        version = _read_version(self.parameter)
        if compares or version != self._version:
            if _fingerprint(self.parameter) != self._fingerprint:
                return True
            self._version = version
        return self.parameter.requires_grad

    def _set(self, requires_grad: bool = True) -> Tensor:
        self._is_users = True
        return Tensor.requires_grad_(self.parameter, requires_grad)

    def _state(self) -> dict[str, Any]:
        own = vars(self.parameter)
        return {name: value for name, value in own.items() if name not in _ATTRIBUTES}


def _read_version(parameter: nn.Parameter) -> int:
    return parameter._version + tree.own_part(parameter)._version


def _fingerprint(parameter: nn.Parameter) -> tuple[int, str]:
    """Return the sum of bit patterns, for which torch makes no copy, and that of the values.

    The first wraps, so that halving 512 values does not show in it.
    """
    part = tree.own_part(parameter)
    kind = _INTEGERS.get(part.element_size(), torch.int64)
    has_sum = part.is_floating_point() and part.element_size() > 1
    return int(part.view(kind).sum(dtype=kind)), str(part.sum().item()) if has_sum else ""


class _Train:
    """`module.train` of a submodule that stays in eval mode; it notes the mode it would have.

    Copies and pickles have the method of the class in its place, so that they follow `train()`.
    """

    def __init__(self, module: nn.Module, model: nn.Module) -> None:
        self._module, self._model = module, model
        self._own = vars(module).get("train")
        # The mode that it has by itself; None where it has the model's.
        self._wish = None if module.training == model.training else module.training
        self._version = self._statistics_version()

    def hold(self) -> None:
        vars(self._module)["train"] = self
        self._module.training = False

    def release(self) -> None:
        self._module.training = self._model.training if self._wish is None else self._wish
        if self._own is None:
            vars(self._module).pop("train", None)
        else:
            vars(self._module)["train"] = self._own

    def __call__(self, mode: bool = True) -> nn.Module:
        method, args = self._method()
        method(*args, mode)
        if self._module.training != self._wish:
            follows = self._module.training == self._model.training
            self._wish = None if follows else self._module.training
        self._module.training = mode and self._was_reset()
        return self._module

    def __reduce__(self) -> tuple[Any, ...]:
        # As `partial` reduces itself: its state comes behind it, so that cycles are no problem.
        method, args = self._method()
        return partial, (method,), (method, args, {}, None)

    def _method(self) -> tuple[Any, tuple[Any, ...]]:
        """Return what `train` is without us, and what to call it with."""
        return (type(self._module).train, (self._module,)) if self._own is None else (self._own, ())

    def _was_reset(self) -> bool:
        """Return whether a normalisation makes its statistics anew (`swa_utils.update_bn`)."""
        if self._statistics_version() == self._version:
            return False  # nothing wrote to them; the count may be on an accelerator
        count = getattr(self._module, "num_batches_tracked", None)
        return isinstance(count, Tensor) and not count.item()

    def _statistics_version(self) -> int:
        mean = getattr(self._module, "running_mean", None)
        return mean._version if isinstance(mean, Tensor) else 0


class _Boundary:
    """Hooks at the output of the frozen front, which stop gradients that nothing behind it needs.

    A tied embedding, or an activation that requires a gradient for the sake of checkpoints, would
    keep the backward pass of the whole front. If the first pass with gradients shows none, the
    hooks are removed. Nothing is detached in a pass whose inputs require a gradient, outside of a
    call of the model (its parts may be called one by one), and while the user trains one of the
    parameters in `still`, or others in their place (`torch.func`); None: never. Reentrant
    checkpoints behind the boundary need an input that requires a gradient, and get one.
    """

    def __init__(
        self, model: nn.Module, tap: nn.Module, still: list[_Place] | None, is_reentrant: bool
    ) -> None:
        self._model, self._tap, self._still = model, tap, still
        self._is_reentrant = self._is_needed = is_reentrant
        # `was` of the last call of the model, for what a checkpoint computes anew.
        self._is_asked = self._was_asked = True

    def open(self) -> None:
        self._model.register_forward_pre_hook(Hook(self, _Boundary._enter), with_kwargs=True)
        self._model.register_forward_hook(Hook(self, _Boundary._leave), always_call=True)
        self._tap.register_forward_hook(Hook(self, _Boundary._look_at_output))

    def close(self) -> None:
        sweep(self._model, self)

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any = None) -> None:
        self._is_asked = self._was_asked = tree.requires_grad((args, kwargs))

    def _leave(self, *_: Any) -> None:
        self._is_asked = True

    def _look_at_output(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        is_now = torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1
        is_asked = self._is_asked if is_now else self._was_asked
        own = (table.get(name) for table, name in self._still or ())
        trains = any(parameter is not None and parameter.requires_grad for parameter in own)
        detaches = self._still is not None and not is_asked and not trains
        if detaches and not self._is_needed:
            self._is_needed = tree.requires_grad(output)
            if not self._is_needed:
                self.close()
        if not self._is_needed or not (detaches or self._is_reentrant):
            return None
        first = tree.first_activation(output)

        def detach(tensor: Tensor) -> Tensor:
            needs_leaf = self._is_reentrant and tensor is first
            if not (detaches if tensor.requires_grad else needs_leaf):
                return tensor
            cut = tensor.detach()
            return cut.requires_grad_() if self._is_reentrant else cut

        return tree.map_tensors(detach, output)
