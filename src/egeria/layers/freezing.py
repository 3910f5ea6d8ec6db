"""Freezing a prefix of layer modules, thawing it without a trace, and noticing who changes frozen
tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from egeria import tree
from egeria.layers.copies import PlainCopies
from egeria.layers.modules import LayerModule
from egeria.layers.shards import own_part


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """What one frozen layer module was like before."""

    parameters: tuple[nn.Parameter, ...] = ()
    """Those that needed a gradient."""
    others: tuple[nn.Parameter, ...] = ()
    """Those that their owner had frozen."""
    modes: tuple[nn.Module, ...] = ()
    """The submodules that stay in inference mode."""
    handles: tuple[RemovableHandle | PlainCopies, ...] = ()


@dataclass(eq=False, slots=True)
class _Mode:
    """How a submodule in inference mode would be without us."""

    training: bool
    momentum: Any
    """Of a normalisation, when it was frozen."""


@dataclass(eq=False, slots=True)
class _Still:
    """What stays in inference mode."""

    modes: dict[nn.Module, _Mode] = field(default_factory=dict)

    def keep(self, submodules: Iterable[nn.Module]) -> None:
        """Put those that the loop has put in training mode back, and take note of it.

        But for a normalisation that makes its statistics anew: `torch.optim.swa_utils.update_bn`
        takes its momentum.
        """
        for submodule in submodules:
            mode = self.modes.get(submodule)
            if mode is not None and submodule.training:
                mode.training = True
                submodule.training = (
                    mode.momentum is not None and getattr(submodule, "momentum", None) is None
                )


class Freezer:
    """Owns the frozen prefix of one model.

    A frozen layer module has parameters that need no gradient and hold none, and stays in inference
    mode whoever calls `model.train()`: normalisation keeps its statistics, dropout is off. A
    submodule that active modules use too, such as one dropout in all blocks, keeps its mode until
    everything that it serves is frozen. A weight that an active module uses too trains on through
    that module; what it contributes at the front is detached, so that no backward pass enters the
    prefix. Optimizer state and groups are never touched, so thawing
    resumes where freezing stopped.

    Args:
        model: the model the modules were cut from.
        modules: its layer modules, front to back.
        trainable: for each layer module whether it had anything to train in the beginning; by
            default all may.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[LayerModule],
        *,
        trainable: Sequence[bool] | None = None,
    ) -> None:
        self._model = model
        self._modules = tuple(modules)
        self._trainable = (True,) * len(self._modules) if trainable is None else tuple(trainable)
        self._records: list[_Record] = []
        self._held: list[nn.Parameter] = []
        """What its owner had frozen, and has switched on meanwhile, while that is held back."""
        self._still = _Still()

    @property
    def depth(self) -> int:
        """How many front layer modules are frozen."""
        return len(self._records)

    @property
    def num_frozen(self) -> int:
        """Elements of the parameters that are frozen: without tied weights that train on through an
        active module.
        """
        return sum(parameter.numel() for record in self._records for parameter in record.parameters)

    @property
    def is_undone(self) -> bool:
        """Whether somebody else switched gradients of a frozen parameter on, also of one that its
        owner had frozen.
        """
        records = self._records
        return any(
            entry.requires_grad
            for record in records
            for entry in (*record.parameters, *record.others)
        )

    def hold(self) -> None:
        """Switch gradients off again that somebody else has switched on, until everything thaws."""
        for record in self._records:
            self._held += [parameter for parameter in record.others if parameter.requires_grad]
            for parameter in (*record.parameters, *record.others):
                parameter.requires_grad_(False)

    def freeze_to(self, depth: int, *, input_needs_grad: bool = False) -> None:
        """Freeze the first `depth` layer modules; those frozen already stay as they are.

        A module that has, or had in the beginning, nothing to train is passed over: it is its
        owner's to unfreeze.

        Args:
            depth: how many are to be frozen.
            input_needs_grad: something in front of the model is in training, so nothing is
                detached.
        """
        keeps_tied = any(module.shared_parameters for module in self._modules[:depth])
        in_use = self._used_outside(depth)
        for index in range(self.depth, depth):
            self._records.append(
                self._freeze(index, in_use, detaches=keeps_tied and not input_needs_grad)
            )

    def thaw(self) -> None:
        """Give every frozen module back as it was; its mode follows the model's, where it did
        before.
        """
        for record in self._records:
            for handle in record.handles:
                handle.remove()
            for parameter in record.parameters:
                parameter.requires_grad_(True)
            for submodule in record.modes:
                submodule.training = self._mode(self._still.modes[submodule])
        for parameter in self._held:
            parameter.requires_grad_(True)
        self._records.clear()
        self._held.clear()
        self._still.modes.clear()

    def stay_in_inference_mode(self) -> None:
        """Do what the hooks of frozen layers do where they do not fire: in a compiled model."""
        self._still.keep(self._still.modes)

    def _mode(self, mode: _Mode) -> bool:
        """Return the mode that a submodule would have without us."""
        return mode.training and self._model.training

    def _used_outside(self, depth: int) -> set[nn.Module]:
        """Return the submodules that are used outside of the first `depth` layer modules, whether
        inside too or not.

        A name elsewhere is such a use; but for submodules with parameters only where one of these
        is shared.
        """
        roots = [
            [self._model.get_submodule(name) for name in module.submodules]
            for module in self._modules
        ]
        fronts, others = (
            {root for own in part for root in own} for part in (roots[:depth], roots[depth:])
        )
        names = {name for module in self._modules[:depth] for name in module.shared_parameters}
        shared = {id(self._model.get_parameter(name)) for name in names}

        def is_front_alone(part: nn.Module) -> bool:
            own = {id(parameter) for parameter in part.parameters()}
            return part in fronts or (bool(own) and own.isdisjoint(shared))

        passed_by = {part for root in fronts for part in root.modules() if is_front_alone(part)}
        elsewhere = {part for _, part in self._model.named_modules(memo=passed_by)}
        return elsewhere.union(*(root.modules() for root in others))

    def _freeze(self, index: int, in_use: set[nn.Module], *, detaches: bool) -> _Record:
        module = self._modules[index]
        kept = set(module.shared_parameters)
        own = [self._model.get_parameter(name) for name in module.parameters if name not in kept]
        parameters = tuple(
            parameter for parameter in own if parameter.requires_grad and self._trainable[index]
        )
        if not parameters:
            return _Record(others=tuple(own))
        others = tuple(parameter for parameter in own if not parameter.requires_grad)
        roots = [
            root
            for name in module.submodules
            if (root := self._model.get_submodule(name)) not in in_use
        ]
        inside = dict.fromkeys(submodule for root in roots for submodule in root.modules())
        done = in_use | self._still.modes.keys()
        modes = {
            part: _Mode(part.training, getattr(part, "momentum", None))
            for part in inside
            if part not in done
        }
        self._still.modes.update(modes)
        for parameter in parameters:
            parameter.requires_grad_(False).grad = None
        for submodule in modes:
            submodule.training = False
        handles: list[RemovableHandle | PlainCopies] = [
            PlainCopies(parameter) for parameter in parameters
        ]
        handles += [
            PlainCopies(submodule, partial(self._mode, mode)) for submodule, mode in modes.items()
        ]
        stay = partial(_stay_in_inference_mode, self._still)
        handles += [root.register_forward_pre_hook(stay, prepend=True) for root in roots]
        if detaches:
            handles += [
                root.register_forward_pre_hook(_detach_inputs, with_kwargs=True) for root in roots
            ]
        return _Record(
            parameters=parameters, others=others, modes=tuple(modes), handles=tuple(handles)
        )


# Hooks are functions of this file, not closures: a model may be copied in its own forward pass,
# hooks and all.


def _stay_in_inference_mode(still: _Still, module: nn.Module, _args: Any) -> None:
    if module.training:
        still.keep(module.modules())


def _detach_inputs(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tree.detach(args), tree.detach(kwargs)


Entry = tuple[Mapping[str, Tensor | None], str]
"""A table of a module, and the name of a parameter or buffer in it."""


class FrozenTensors:
    """Detects whether tensors were assigned, written to, or set to train.

    What writes through `data` (averages of weights, Lookahead) leaves no trace but the values, and
    mostly concerns all weights: so the smallest, `num_compared` in number, are compared by value.
    """

    def __init__(self, entries: Iterable[Entry], *, num_compared: int) -> None:
        self._found = [
            (table, name, _version(table[name]))
            for table, name in entries
            if name != "num_batches_tracked"
        ]
        tensors = (table[name] for table, name, _ in self._found)
        weights = sorted(
            (tensor for tensor in tensors if isinstance(tensor, nn.Parameter)), key=Tensor.numel
        )
        self._compared = [
            (weight, own_part(weight).detach().clone()) for weight in weights[:num_compared]
        ]

    @property
    def have_changed(self) -> bool:
        """Whether one is not what it was."""
        if any(_version(table.get(name)) != version for table, name, version in self._found):
            return True
        return not all(torch.equal(own_part(weight), before) for weight, before in self._compared)


def _version(tensor: Tensor | None) -> tuple[int, int, int, bool]:
    """Return what changes with every assignment, with every change in place that torch knows of,
    and with a thaw.
    """
    if tensor is None:
        return 0, 0, 0, False
    return id(tensor), tensor._version, own_part(tensor).data_ptr(), tensor.requires_grad


def checksum(places: Iterable[Entry]) -> int:
    """Return a checksum of the values of tensors."""
    found = 0
    for tensor in (table[name] for table, name in places):
        if tensor is not None:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return found
