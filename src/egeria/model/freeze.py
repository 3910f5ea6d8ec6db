"""Freezes the front of a model, and gives it back as the user expects it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.model.cut import Cut
from egeria.model.group import is_under
from egeria.model.hooks import Hook, sweep

_ATTRIBUTES = ("requires_grad_", "__getstate__")


class Freezer:
    """Freezes and thaws the front layer modules of one model without wrappers.

    Parameters of a frozen layer module require no gradient and hold none. Its submodules stay in
    eval mode, except those that active layers use too, such as a shared dropout. A layer module in
    which nothing trained keeps the modes that the user gave it.

    A thaw keeps what the user has changed meanwhile: a mode other than the model's, and
    `requires_grad` if `requires_grad_` set it. An assignment, or a call on a tensor subclass, is
    not seen. Without `has_hooks`, as in compiled models, nothing is detached.
    """

    def __init__(self, model: nn.Module, cut: Cut, *, has_hooks: bool = True) -> None:
        self._model, self._cut, self._has_hooks = model, cut, has_hooks
        # Whether batch normalisation of the last layer module keeps its statistics while it trains
        # alone: behind a front in eval mode they would follow the last few batches (record 0056).
        self.keeps_norms = False
        self._held: list[list[_Held]] = []
        self._modes: dict[nn.Module, _Train] = {}
        self._boundary: _Boundary | None = None
        self.is_whole = True  # False after an interrupted change; `freeze_to` mends it

    @property
    def depth(self) -> int:
        """How many front layer modules are frozen."""
        return len(self._held)

    def freeze_to(self, depth: int, *, detaches: bool = True) -> None:
        """Freeze the first `depth` layer modules and thaw all others.

        Their output is detached if the caller and the cut allow it. After an interrupted call the
        next one starts from a thawed model.
        """
        kept = depth if self.is_whole else 0
        self.is_whole = False
        sweep(self._model, self._boundary)  # its hooks, if there is one
        now = dict(self._model.named_parameters(remove_duplicate=False))
        while self.depth > kept:
            for entry in self._held[-1]:  # and the parameter that has replaced it in the model
                entry.release(now.get(entry.name, entry.parameter))
            self._held.pop()
        for module in self._cut.modules[self.depth : depth]:
            self._held.append([])
            for name in (name for name in module.parameters if name in now):
                self._held[-1].append(_Held(name, now[name]))
                self._held[-1][-1].hold()
        self._set_modes(self._find_still(depth) if depth else [])
        if depth and detaches and self._has_hooks and self._cut.detaches[depth]:
            self._boundary = _Boundary(self._model, self._cut, depth)
            self._boundary.open()
        self.is_whole = True

    def moved(self) -> list[str]:
        """Return the names of frozen parameters that were changed, replaced or made to train.

        torch counts writes, except those through `data`. A write of the same values is no change.
        """
        now = dict(self._model.named_parameters(remove_duplicate=False))
        held = (entry for part in self._held for entry in part)
        return [e.name for e in held if now.get(e.name) is not e.parameter or e.has_moved()]

    def _set_modes(self, submodules: list[nn.Module]) -> None:
        """Keep these submodules in eval mode, and no others."""
        for submodule in set(self._modes).difference(submodules):
            self._modes[submodule].release()
            del self._modes[submodule]
        for submodule in submodules:
            self._modes.setdefault(submodule, _Train(submodule, self._model)).hold()

    def _find_still(self, depth: int) -> list[nn.Module]:
        """Return the submodules that stay in eval mode: of the front those no active layer uses."""
        roots = [[self._model.get_submodule(n) for n in m.submodules] for m in self._cut.modules]
        front = [part for own in roots[:depth] for part in own]
        later = {part for own in roots[depth:] for root in own for part in root.modules()}
        elsewhere = {part for _, part in self._model.named_modules(memo=set(front))}

        def serves(part: nn.Module) -> bool:
            # A submodule without parameters that has another name elsewhere is used there too. One
            # with parameters may just have two names, and counts where its parameters do.
            if part in later or any(p.requires_grad for p in part.parameters(recurse=False)):
                return True
            return part in elsewhere and next(part.parameters(), None) is None

        is_ours = [any(entry.was_active for entry in own) for own in self._held[:depth]]
        frozen = [root for index in range(depth) if is_ours[index] for root in roots[index]]
        keeps = self.keeps_norms and depth == len(roots) - 1
        norms = (p for p in later if keeps and isinstance(p, nn.modules.batchnorm._BatchNorm))
        still = {p for root in frozen for p in root.modules() if not serves(p)}.union(norms)
        return [part for part in still if not _needs_mode(part)]


def _needs_mode(part: nn.Module) -> bool:
    """Return whether a submodule keeps its mode, because more depends on the mode.

    In eval mode quantized weights may be packed for inference, for good, and if its first layer is
    in it, `nn.TransformerEncoder` gives nested tensors to all its layers. A submodule with its own
    `train` keeps the mode that its user wants.
    """
    train = vars(part).get("train")
    is_of_a_copy = getattr(train, "func", None) is type(part).train  # of one that was frozen
    if not (train is None or isinstance(train, _Train) or is_of_a_copy):
        return True
    own = [p for p in part.parameters(recurse=False) if p.dim() > 1 and not hasattr(p, "to_local")]
    is_quantized = any(type(parameter) is not nn.Parameter for parameter in own)
    return is_quantized or isinstance(part, nn.TransformerEncoderLayer)


class _Held:
    """One frozen parameter; it notices a call of `requires_grad_`, and pickles as before."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.was_active = parameter.requires_grad  # False if the loop had switched it off
        self._is_users = not self.was_active
        self._version, self._sum = self._read_version(), tree.sum_bytes(parameter)

    def hold(self) -> None:
        if type(self.parameter) is nn.Parameter:
            vars(self.parameter).update(__getstate__=self._state, requires_grad_=self._set)
        if self.was_active:
            Tensor.requires_grad_(self.parameter, False)
            self.parameter.grad = None

    def release(self, successor: nn.Parameter) -> None:
        """Let the parameter train again, and the one that has replaced it in the model."""
        if not self._is_users:
            for parameter in (self.parameter, successor):
                if parameter.is_floating_point() or parameter.is_complex():
                    Tensor.requires_grad_(parameter, True)
        for name in _ATTRIBUTES:
            vars(self.parameter).pop(name, None)

    def has_moved(self) -> bool:
        """Return whether the parameter has changed since it was frozen."""
        before, self._version = self._version, self._read_version()
        is_written = self._version != before and tree.sum_bytes(self.parameter) != self._sum
        return is_written or self.parameter.requires_grad

    def _set(self, requires_grad: bool = True) -> Tensor:
        self._is_users = True
        return Tensor.requires_grad_(self.parameter, requires_grad)

    def _state(self) -> dict[str, Any]:
        own = vars(self.parameter)
        return {name: value for name, value in own.items() if name not in _ATTRIBUTES}

    def _read_version(self) -> int:
        return self.parameter._version + tree.own_part(self.parameter)._version


class _Train:
    """Replaces `train` of a submodule that stays in eval mode; copies get the class's own."""

    def __init__(self, module: nn.Module, model: nn.Module) -> None:
        self._module, self._model = module, model
        # The mode that the user gave it; None if it follows the model's.
        self._wish = None if module.training == model.training else module.training
        self._version = getattr(self._count, "_version", 0)

    def hold(self) -> None:
        vars(self._module)["train"] = self
        self._module.training = False

    def release(self) -> None:
        self._module.training = self._model.training if self._wish is None else self._wish
        vars(self._module).pop("train", None)

    def __call__(self, mode: bool = True) -> nn.Module:
        type(self._module).train(self._module, mode)
        if self._module.training != self._wish:
            follows = self._module.training == self._model.training
            self._wish = None if follows else self._module.training
        # `swa_utils.update_bn` computes statistics anew. Unwritten, they are not read off a device.
        is_written = getattr(self._count, "_version", 0) != self._version
        self._module.training = mode and is_written and not self._count.item()
        return self._module

    def __reduce__(self) -> tuple[Any, ...]:
        # As `partial` does: the state comes after the object, so cycles are no problem.
        method = type(self._module).train
        return partial, (method,), (method, (self._module,), {}, None)

    @property
    def _count(self) -> Any:
        """How many batches are in the statistics of a normalisation layer."""
        return getattr(self._module, "num_batches_tracked", None)


class _Boundary:
    """Hooks that detach the output of the frozen front.

    Otherwise a tied embedding, or an activation that requires a gradient because of checkpoints,
    would keep the whole backward pass of the front. Nothing is detached in a pass whose inputs
    require a gradient, outside of a call of the model, and while a parameter in front that no
    active layer module uses trains: the user's own, or a replacement (`torch.func`).
    """

    def __init__(self, model: nn.Module, cut: Cut, depth: int) -> None:
        front, later = cut.modules[:depth], cut.modules[depth:]
        self._model, self._tap = model, model.get_submodule(front[-1].tap)
        now = dict(model.named_parameters(remove_duplicate=False))
        used_later = {now.get(name) for own in later for name in own.parameters}
        pieces = [name for own in front for name in own.submodules]

        def is_in_front(name: str) -> bool:  # inside of a piece, or around some
            return any(is_under(f"{name}.", piece) or is_under(piece, name) for piece in pieces)

        tables = [part._parameters for name, part in model.named_modules() if is_in_front(name)]
        self._places = [(t, name) for t in tables for name in t if t[name] not in used_later]
        # Whether inputs require a gradient: now, and in the last call, which checkpoints repeat.
        self._is_asked = self._was_asked = True

    def open(self) -> None:
        self._model.register_forward_pre_hook(Hook(self, _Boundary._enter), with_kwargs=True)
        self._model.register_forward_hook(Hook(self, _Boundary._leave), always_call=True)
        self._tap.register_forward_hook(Hook(self, _Boundary._detach))

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any = None) -> None:
        self._is_asked = self._was_asked = tree.requires_grad((args, kwargs))

    def _leave(self, *_: Any) -> None:
        self._is_asked = True

    def _detach(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        is_now = torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1
        is_asked = self._is_asked if is_now else self._was_asked
        if is_asked or not (torch.is_grad_enabled() and tree.requires_grad(output)):
            return None
        own = (table.get(name) for table, name in self._places)
        if any(parameter is not None and parameter.requires_grad for parameter in own):
            return None
        return tree.map_tensors(lambda t: t.detach() if t.requires_grad else t, output)
