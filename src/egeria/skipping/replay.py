"""Standing in for frozen submodules during one forward pass: stubs, and the shapes they keep to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.errors import UncacheableError

Place = tuple[str, int]
"""A tensor that a root gives: its dotted name, and the index of the tensor among the leaves of its output."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a tensor is like, apart from its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Return the form of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """Return memory of this form.

        With the strides too, since they decide which kernels run behind it (channels_last); but not those of
        a small part of a larger tensor or of a repeated one.
        """
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        numel = 1
        for size in self.shape:
            numel *= size
        if numel <= span <= 2 * numel:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def poison(self, *, materialised: bool = False) -> Tensor:
        """Return NaN of this form; without memory, unless it is to be written to."""
        one = torch.full((), torch.nan, dtype=self.dtype, device=self.device)
        return one.expand(self.shape).clone() if materialised else one.expand(self.shape)


def can_be_poisoned(tensor: Tensor) -> bool:
    """Return whether the dtype has a NaN."""
    return tensor.is_floating_point() or tensor.is_complex()


class Template:
    """The outputs of the roots in one kind of call, without the values: what a stub gives back.

    Tensors without a NaN are kept as they are; any place can be given its value for good with `keep`.
    """

    def __init__(self) -> None:
        self._trees: dict[str, Any] = {}
        self._kept: dict[Place, Tensor] = {}
        self.forms: dict[Place, Form] = {}
        self.materialised = False

    def add(self, root: str, output: Any) -> None:
        """Learn the output of a root."""
        self._trees[root] = tree.map_tensors(_emptied, output)
        for index, tensor in enumerate(tree.leaves(output)):
            self.forms[root, index] = Form.of(tensor)

    def drop(self, root: str) -> None:
        """Forget a root: it will run itself."""
        del self._trees[root]
        self.forms = {place: form for place, form in self.forms.items() if place[0] != root}

    def blank(self, place: Place) -> Tensor:
        """Return the poison at a place, or the value that a tensor without a NaN had."""
        root, index = place
        return list(tree.leaves(self._trees[root]))[index]

    @property
    def roots(self) -> tuple[str, ...]:
        """The names of the roots, in the order of their calls."""
        return tuple(self._trees)

    @property
    def kept_bytes(self) -> int:
        """Memory of the values that are kept."""
        return sum(value.numel() * value.element_size() for value in self._kept.values())

    @property
    def has_integers(self) -> bool:
        """Whether some tensors have no NaN, and are given back as they were."""
        return any(not can_be_poisoned(tensor) for output in self._trees.values() for tensor in tree.leaves(output))

    def keep(self, place: Place, value: Tensor) -> None:
        """Give this value at every replay."""
        self._kept[place] = value.detach().clone()

    def fill(self, root: str, values: Mapping[Place, Tensor]) -> Any:
        """Return an output of a root: with `values` in their places, copies of what is kept, and poison elsewhere."""
        index = count()

        def pick(tensor: Tensor) -> Tensor:
            place = (root, next(index))
            if place in values:
                return values[place]
            if place in self._kept:
                return self._kept[place].clone()
            return self._blank(place, tensor)

        return tree.map_tensors(pick, self._trees[root])

    def _blank(self, place: Place, tensor: Tensor) -> Tensor:
        if not can_be_poisoned(tensor):
            return tensor.clone()
        return self.forms[place].poison(materialised=True) if self.materialised else tensor.detach()


class Stub:
    """What is called in place of a root's own `forward`."""

    def __init__(self, template: Template, root: str, values: Mapping[Place, Tensor]) -> None:
        self._template, self._root, self._values = template, root, values
        self.calls = 0

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return what the root would."""
        self.calls += 1
        return self._template.fill(self._root, self._values)


class ActiveStubs:
    """Stubs that are in place."""

    def __init__(self, stubs: Mapping[str, Stub]) -> None:
        self._stubs = stubs

    def check(self) -> None:
        """Make sure that the forward pass called each stub once.

        Raises:
            UncacheableError: it did not.
        """
        for root, stub in self._stubs.items():
            if stub.calls != 1:
                raise UncacheableError(
                    f"{root} was called {stub.calls} times in a forward pass, and once when it was tried out"
                )


@contextmanager
def stubbed(model: nn.Module, template: Template, values: Mapping[Place, Tensor]) -> Iterator[ActiveStubs]:
    """Let stubs answer for the roots of a template; the modules are as before after the block, whatever happens.

    The stub is an attribute of the instance, and only for the block: a model that keeps one can neither be
    saved nor copied (its copy would run the weights of the original).
    """
    stubs = {root: Stub(template, root, values) for root in template.roots}
    before: list[tuple[nn.Module, Any]] = []
    try:
        for root, stub in stubs.items():
            module = model.get_submodule(root)
            before.append((module, vars(module).get("forward")))
            vars(module)["forward"] = stub
        yield ActiveStubs(stubs)
    finally:
        for module, forward in before:
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward


@contextmanager
def replaying(model: nn.Module, template: Template, values: Mapping[Place, Tensor]) -> Iterator[ActiveStubs]:
    """Let stubs answer for the roots of a template in one forward pass.

    Raises:
        UncacheableError: at the end of the block, that the pass did not call each of them once.
    """
    with stubbed(model, template, values) as replay:
        yield replay
    replay.check()


def _emptied(tensor: Tensor) -> Tensor:
    return Form.of(tensor).poison() if can_be_poisoned(tensor) else tensor.detach().clone()
