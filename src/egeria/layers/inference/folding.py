"""Layers of a frozen prefix computed with tensors of their own: batch norm folded in, weights cast and laid out once.

Nothing here touches the user's modules. A part says with which `forward` its modules are to run; whoever
runs the model puts these in their place for one forward pass (`overridden`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

from egeria.layers.freezer import Freezer
from egeria.layers.sources import Sources

Forward = Callable[..., Any]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
LINEARS = (nn.Linear,)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@contextmanager
def overridden(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Let modules run another `forward` for the block, then put back what they had, whatever happens."""
    before = [(module, vars(module).get("forward")) for module in forwards]
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Tell whether a module is frozen and computes what its class says, with parameters of its own, unwatched.

    Hooks of the freezer do not count: they keep the inference mode, which is all the better.
    """
    if type(module) not in kinds or "forward" in vars(module) or _has_foreign_hooks(module):
        return False
    return all(
        parameter is None or (type(parameter) is nn.Parameter and not parameter.requires_grad)
        for parameter in (module._parameters.get(name, _COMPUTED) for name in ("weight", "bias"))
    )


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return what autocast would cast `x` to here; None without autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class Part(Protocol):
    """Some modules that run differently."""

    @property
    def forwards(self) -> Mapping[nn.Module, Forward]:
        """The `forward` to give each of its modules."""

    def is_stale(self) -> bool:
        """Tell whether its tensors no longer belong to the modules as they are."""

    def settle(self) -> bool:
        """End a forward pass; tell whether the part did in it what it was made for."""


class Fold:
    """A convolution that also does the work of the batch norm behind it, which passes on what it gets.

    Args:
        convolution: a plain convolution.
        norm: the plain batch norm, in inference mode, that alone reads its output.
        cast_to: what autocast casts the weights to at every call; None if it does not.
        channels_last_for: makes the weights channels_last for inputs of this shape (without the batch
            axis); others run as they would have, since a view may not allow the layout. None keeps it.
    """

    def __init__(
        self,
        convolution: nn.Module,
        norm: nn.Module,
        *,
        cast_to: torch.dtype | None = None,
        channels_last_for: torch.Size | None = None,
    ) -> None:
        self.convolution: Any = convolution
        self._norm: Any = norm
        weight, bias = _fused(self.convolution, self._norm)
        if channels_last_for is not None:
            weight = weight.contiguous(memory_format=torch.channels_last)
        self._shape = channels_last_for
        self._weights = _Weights(weight, bias, cast_to)
        self._sources = Sources.of(convolution, norm)
        self._pending: tuple[Tensor, int] | None = None
        self._failed = False

    @property
    def forwards(self) -> Mapping[nn.Module, Forward]:
        """The `forward` to give the convolution and the norm."""
        return {self.convolution: self._convolve, self._norm: self._pass_on}

    def is_stale(self) -> bool:
        """Tell whether weights, statistics or hooks are others than when it was made."""
        plain = is_plain(self.convolution, CONVOLUTIONS) and is_plain(self._norm, NORMS)
        return not plain or self._sources.have_changed

    def settle(self) -> bool:
        """End a forward pass; tell whether the norm got each output of the convolution, untouched."""
        kept = self._pending is None and not self._failed
        self._pending, self._failed = None, False
        return kept

    # Arguments are called as in torch: they may come by keyword.

    def _convolve(self, input: Tensor) -> Tensor:
        weight, bias = self._weights.under_autocast_of(input)
        if self._shape is not None and input.shape[1:] != self._shape:
            weight = weight.contiguous()
        y: Tensor = self.convolution._conv_forward(input, weight, bias)
        if not torch.compiler.is_compiling():
            self._failed |= self._pending is not None
            self._pending = (y, y._version)
        return y

    def _pass_on(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            pending, self._pending = self._pending, None
            y, version = pending or (None, 0)
            self._failed |= y is not input or version != input._version or self._norm.training
        return input


class Cast:
    """A linear layer with weights that autocast has nothing left to cast on."""

    def __init__(self, linear: nn.Module, cast_to: torch.dtype) -> None:
        weight, bias = (linear._parameters[name] for name in ("weight", "bias"))
        assert weight is not None
        self._linear = linear
        self._weights = _Weights(weight.detach(), None if bias is None else bias.detach(), cast_to)
        self._sources = Sources.of(linear)

    @property
    def forwards(self) -> Mapping[nn.Module, Forward]:
        """The `forward` to give the layer."""
        return {self._linear: self._apply}

    def is_stale(self) -> bool:
        """Tell whether weights or hooks are others than when it was made."""
        return not is_plain(self._linear, LINEARS) or self._sources.have_changed

    def settle(self) -> bool:
        """End a forward pass; it is right whatever comes."""
        return True

    def _apply(self, input: Tensor) -> Tensor:
        return functional.linear(input, *self._weights.under_autocast_of(input))


class _Weights:
    """Weight and bias as training has them, and as autocast would make them."""

    def __init__(self, weight: Tensor, bias: Tensor | None, cast_to: torch.dtype | None) -> None:
        self._full = (weight, bias)
        self._cast_to = cast_to if weight.dtype == torch.float32 else None
        self._cast = (weight.to(cast_to), None if bias is None else bias.to(cast_to)) if self._cast_to else self._full

    def under_autocast_of(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what a layer is to compute with here: never a lower precision than autocast asks for."""
        return self._cast if self._cast_to is not None and autocast_dtype(x) == self._cast_to else self._full


_COMPUTED: Any = object()


def _has_foreign_hooks(module: nn.Module) -> bool:
    hooks = (hook for kind in _HOOKS for hook in getattr(module, kind).values())
    return any(getattr(hook, "__module__", "") != Freezer.__module__ for hook in hooks)


def _fused(convolution: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Return weight and bias of both in one, computed in float32 at least."""
    dtype = convolution.weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    tensors = (convolution.weight, convolution.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    copies: list[Any] = [None if tensor is None else tensor.detach().to(wide) for tensor in tensors]
    weight, bias, mean, variance, scale, shift = copies
    fused = fuse_conv_bn_weights(weight, bias, mean, variance, norm.eps, scale, shift)
    return fused[0].detach().to(dtype), fused[1].detach().to(dtype)
