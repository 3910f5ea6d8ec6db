"""Standing in for frozen submodules during one forward pass: stubs, and the shapes they keep to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.errors import UncacheableError

Place = tuple[str, int]
"""A tensor that a root gives: its dotted name, and the index of the tensor among the leaves of its
output."""
Values = Mapping[Place, Tensor]


@dataclass(frozen=True, slots=True)
class Form:
    """What a tensor is like, apart from its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Describe a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def can_be_poisoned(self) -> bool:
        """Whether the dtype has a NaN."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def empty(self) -> Tensor:
        """Return memory of this form.

        With the strides too, since they decide which kernels run behind it (channels_last); but not
        those of a small part of a larger tensor or of a repeated one.
        """
        span = 1 + sum(
            (size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)
        )
        numel = math.prod(self.shape)
        if numel <= span <= 2 * numel:
            return torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device
            )
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def poison(self) -> Tensor:
        """Return NaN of this form, which takes no memory."""
        return torch.full((), torch.nan, dtype=self.dtype, device=self.device).expand(self.shape)


class Template:
    """The outputs of the roots in one kind of call, without the values: what a stub gives back.

    Tensors without a NaN are kept as they are; any place can be given its value for good with
    `keep`.
    """

    def __init__(self) -> None:
        self._trees: dict[str, Any] = {}
        self._kept: dict[Place, Tensor] = {}
        self.forms: dict[Place, Form] = {}
        self.materialised = False
        """Whether poison takes memory: operations that write into it need some."""

    @property
    def roots(self) -> tuple[str, ...]:
        """The names of the roots, in the order of their calls."""
        return tuple(self._trees)

    @property
    def kept_bytes(self) -> int:
        """Memory of the values that are kept."""
        return sum(value.nbytes for value in self._kept.values())

    def add(self, root: str, output: Any) -> None:
        """Learn the output of a root."""
        forms = [Form.of(tensor) for tensor in tree.leaves(output)]
        self.forms.update({(root, index): form for index, form in enumerate(forms)})
        own = iter(forms)

        def blank(tensor: Tensor) -> Tensor:
            form = next(own)
            return form.poison() if form.can_be_poisoned else tensor.detach().clone()

        self._trees[root] = tree.map_tensors(blank, output)

    def drop(self, root: str) -> None:
        """Forget a root: it will run itself."""
        del self._trees[root]
        self.forms = {place: form for place, form in self.forms.items() if place[0] != root}

    def blank(self, place: Place) -> Tensor:
        """Return the poison at a place, or the value that a tensor without a NaN had."""
        return list(tree.leaves(self._trees[place[0]]))[place[1]]

    def keep(self, values: Values) -> None:
        """Give these values at every replay."""
        self._kept.update({place: value.detach().clone() for place, value in values.items()})

    def fill(self, root: str, values: Values) -> Any:
        """Return an output of a root: with `values` in their places, copies of what is kept, and
        poison elsewhere.
        """
        index = count()

        def pick(blank: Tensor) -> Tensor:
            place = (root, next(index))
            if place in values:
                return values[place]
            if place in self._kept:
                return self._kept[place].clone()
            is_written = self.materialised or not self.forms[place].can_be_poisoned
            return blank.clone() if is_written else blank.detach()

        return tree.map_tensors(pick, self._trees[root])


@contextmanager
def stubbed(model: nn.Module, template: Template, values: Values) -> Iterator[dict[str, int]]:
    """Let stubs answer for the roots of a template, and count their calls; modules are as before
    after the block.

    The stub is an attribute of the instance, and only for the block: a model that keeps one can
    neither be saved nor copied (its copy would run the weights of the original).
    """
    calls = dict.fromkeys(template.roots, 0)
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for root in template.roots:
            attributes = vars(model.get_submodule(root))
            before.append(
                (attributes, {"forward": attributes["forward"]} if "forward" in attributes else {})
            )
            stub = partial(_answer, template, root, values, calls)
            stub.own_forward = attributes.get("forward")  # type: ignore[attr-defined]  # what copies keep
            attributes["forward"] = stub
        yield calls
    finally:
        for attributes, own in before:
            del attributes["forward"]
            attributes.update(own)


@contextmanager
def replaying(model: nn.Module, template: Template, values: Values) -> Iterator[None]:
    """Let stubs answer in one forward pass, which must call each of them once: else it is refused
    afterwards.
    """
    with stubbed(model, template, values) as calls:
        yield
    for root, number in calls.items():
        if number != 1:
            raise UncacheableError(
                f"{root} was called {number} times in a forward pass, and once when it was tried "
                "out"
            )


# A function of this file, not a closure: some models copy themselves in their forward pass.


def _answer(
    template: Template,
    root: str,
    values: Values,
    calls: dict[str, int],
    *_args: Any,
    **_kwargs: Any,
) -> Any:
    calls[root] += 1
    return template.fill(root, values)
