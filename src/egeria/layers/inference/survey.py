"""What could be left out of a frozen prefix: found by watching it run, and by lying to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from egeria.layers.inference.folding import CONVOLUTIONS, LINEARS, NORMS, Forward, autocast_dtype, is_plain
from egeria.layers.inference.probe import SAME, Probe, poison


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A convolution, the norm that gets its very output, and how they were called."""

    convolution: nn.Module
    norm: nn.Module
    input_shape: torch.Size
    """Without the batch axis."""
    layout: str
    """Of the convolution's output: "contiguous", "channels_last", or "" where it is both or neither."""
    cast_to: torch.dtype | None
    """What autocast casts to there."""
    dtype: torch.dtype
    """What it computes in."""
    device_type: str


class Survey:
    """Looks at what plain convolutions, norms and linear layers of a prefix do in one forward pass.

    Args:
        probe: runs the pass.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._calls: dict[nn.Module, int] = {}
        self._convolved: dict[nn.Module, tuple[Tensor, Tensor, int]] = {}
        self._pairs: dict[nn.Module, Pair] = {}
        self._casts: dict[nn.Module, torch.dtype | None] = {}
        modules = {module: None for root in probe.roots.values() for module in root.modules()}
        with probe.run(dict(self._watchers(modules))) as self.plain:
            pass
        self._convolved.clear()

    @property
    def pairs(self) -> list[Pair]:
        """Pairs that were called once; somebody else may read what goes from one to the other."""
        return [pair for pair in self._pairs.values() if self._calls[pair.convolution] == self._calls[pair.norm] == 1]

    @property
    def casts(self) -> dict[nn.Module, torch.dtype]:
        """Linear layers whose weights autocast casts, and to what."""
        return {
            linear: dtype
            for linear, dtype in self._casts.items()
            if dtype is not None and linear.weight.dtype == torch.float32
        }

    def without_other_readers(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the pairs where nobody but the norm reads or keeps the output of the convolution.

        All others get NaN in its place. A pass with all pairs, and if that shows one with each.
        """
        if not pairs or self._is_private(pairs):
            return list(pairs)
        return [pair for pair in pairs if len(pairs) > 1 and self._is_private([pair])]

    def _watchers(self, modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, Forward]]:
        for module in modules:
            if is_plain(module, CONVOLUTIONS):
                yield module, self._watch(module, self._note_convolution)
            elif is_plain(module, NORMS):
                yield module, self._watch(module, self._note_norm)
            elif is_plain(module, LINEARS):
                yield module, self._watch(module, self._note_linear)

    def _watch(self, module: nn.Module, note: Callable[[nn.Module, Tensor, Tensor], None]) -> Forward:
        forward = module.forward

        def watched(input: Tensor) -> Tensor:
            output: Tensor = forward(input)
            self._calls[module] = self._calls.get(module, 0) + 1
            note(module, input, output)
            return output

        return watched

    def _note_convolution(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        self._convolved[module] = (x, y, y._version)

    def _note_norm(self, norm: Any, x: Tensor, y: Tensor) -> None:
        if norm.training or norm.running_mean is None or y.dtype != x.dtype:
            return
        for convolution, (x0, y0, version) in self._convolved.items():
            weight: Any = convolution.weight
            if y0 is x and version == x._version and x.dim() == weight.dim():
                self._pairs[norm] = Pair(
                    convolution=convolution,
                    norm=norm,
                    input_shape=x0.shape[1:],
                    layout=_layout(y0),
                    cast_to=autocast_dtype(x0),
                    dtype=y0.dtype,
                    device_type=y0.device.type,
                )

    def _note_linear(self, module: nn.Module, x: Tensor, _y: Tensor) -> None:
        self._casts[module] = autocast_dtype(x)

    def _is_private(self, pairs: Sequence[Pair]) -> bool:
        hidden: dict[nn.Module, Tensor] = {}
        shown: list[weakref.ref[Tensor]] = []

        def detour(pair: Pair) -> tuple[Forward, Forward]:
            convolve, normalise = pair.convolution.forward, pair.norm.forward

            def hide(input: Tensor) -> Tensor:
                hidden[pair.norm] = convolve(input)
                lie = poison(hidden[pair.norm])
                shown.append(weakref.ref(lie))
                return lie

            return hide, lambda input: normalise(hidden.pop(pair.norm))

        forwards: dict[nn.Module, Forward] = {}
        for pair in pairs:
            forwards[pair.convolution], forwards[pair.norm] = detour(pair)
        convolutions = {pair.convolution for pair in pairs}
        without = [name for name, root in self._probe.roots.items() if root in convolutions]
        try:
            with self._probe.run(forwards) as outcome:
                is_kept = any(reference() is not None for reference in shown)
                return not is_kept and outcome.error(self.plain, without, with_result=True) <= SAME
        except Exception:  # the model looks at its numbers, and met NaN
            return False


def _layout(tensor: Tensor) -> str:
    fits = {
        "contiguous": tensor.is_contiguous(),
        "channels_last": tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last),
    }
    layouts = [layout for layout, fit in fits.items() if fit]
    return layouts[0] if len(layouts) == 1 else ""
