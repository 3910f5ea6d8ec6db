"""One model of the menagerie."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Specimen:
    """A way to build a model and to call it."""

    case: str
    """The edge case, in one sentence."""
    build: Callable[[], nn.Module]
    example: Callable[[torch.Generator], Arguments]
    """Makes the arguments of one call."""
    unsupported: str = ""
    """Why egeria freezes nothing here; empty for those it freezes."""

    @property
    def name(self) -> str:
        """The name of what builds it."""
        return self.build.__name__

    def loss(self, output: Any) -> Tensor:
        """Return a loss that every floating-point tensor of the output takes part in."""
        parts = [(tensor.float() - 1).square().mean() for tensor in _tensors(output) if tensor.is_floating_point()]
        return torch.stack(parts).sum()


def images(generator: torch.Generator) -> Arguments:
    """Six images of 3 x 8 x 8."""
    return (torch.randn(6, 3, 8, 8, generator=generator),), {}


def vectors(generator: torch.Generator) -> Arguments:
    """Six vectors of 8."""
    return (torch.randn(6, 8, generator=generator),), {}


def tokens(generator: torch.Generator) -> Arguments:
    """Six sentences of 5 words."""
    return (torch.randint(0, 20, (6, 5), generator=generator),), {}


def _tensors(output: Any) -> list[Tensor]:
    return list(tree.leaves(vars(output) if hasattr(output, "__dict__") and not isinstance(output, Tensor) else output))
