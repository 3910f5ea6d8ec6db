"""The frozen prefix as inference, for when its outputs cannot be cached."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.errors import EgeriaError
from egeria.layers.batch import Batch
from egeria.layers.inference.folding import Cast, Fold, Forward, Part, overridden
from egeria.layers.inference.probe import Outcome, Probe
from egeria.layers.inference.survey import Pair, Survey

_NUM_ROWS = 8
"""Samples that the prefix is tried on: who reads what, and whether folding is right, shows on any."""
_TOLERANCE = 1e-4
"""Largest relative difference from the plain prefix in float32 and float64."""
_TOLERANCE_ULP = 4
"""The same in lower precision, in units in the last place of the largest value of a tensor."""
_TOLERANCE_OF_ROUNDING = 3.0
"""The same, as a multiple of what rounding costs the plain prefix against float32, where that can be run. Of deep
prefixes it costs 20 units; fast and plain were 0.7 to 1.8 times as far apart (benchmarks/micro/fast_prefix)."""
_TF32_ULP = 2**-10


class FastPrefixError(EgeriaError):
    """The prefix did not run as it did when it was tried: what this forward pass gave must not be used."""


class FastPrefix:
    """Runs the frozen prefix with batch norm folded into the convolutions in front of it.

    Folded weights are channels_last where that is faster, weights are cast for autocast once instead of in
    every forward pass, and what leaves the prefix has the layout that it would have had. The precision is that
    of training. The user's modules stay as they are: other forwards take the place of theirs for one forward
    pass of the model, in `running`.

    Args:
        parts: what runs differently.
        restored: roots whose outputs are to be contiguous, as they would be without channels_last.
        compiled: roots to compile.
    """

    error: float = 0.0
    """Largest relative difference from the plain prefix, where it was tried."""

    def __init__(
        self, parts: Sequence[Part], restored: Sequence[nn.Module] = (), compiled: Sequence[nn.Module] = ()
    ) -> None:
        self.parts = tuple(parts)
        self.restored = tuple(restored)
        self.folded = frozenset(part.convolution for part in self.parts if isinstance(part, Fold))
        self.forwards = {module: forward for part in parts for module, forward in part.forwards.items()}
        self._compiled = [_Compiled(root) for root in compiled]
        self.forwards.update((compiled.root, compiled.forward) for compiled in self._compiled)
        for root in restored:
            self.forwards[root] = _making_contiguous(self.forwards.get(root, root.forward))

    @classmethod
    def build(cls, model: nn.Module, roots: Sequence[str], batch: Batch, *, compile: bool = False) -> FastPrefix | None:
        """Make a faster prefix and try it against the plain one.

        Args:
            model: the unwrapped model, its prefix frozen.
            roots: dotted names of the submodules of the prefix, none inside another.
            batch: arguments of a training call. A few rows of it are run several times, without a trace.
            compile: whether to try `torch.compile` on the roots too; any failure leaves it out. It takes
                seconds to minutes, here and again for every other shape of the input.

        Returns:
            The prefix, or None where nothing is gained.

        Raises:
            Exception: whatever the model raises on these rows.
        """
        found = _Trials(Probe(model, roots, batch.first_rows(_NUM_ROWS))).best()
        if not compile:
            return found
        trials = _Trials(Probe(model, roots, batch, gradients=True))
        return trials.compiled(found) or found

    @property
    def num_folded(self) -> int:
        """How many batch norms are folded."""
        return len(self.folded)

    @property
    def num_cast(self) -> int:
        """For how many linear layers autocast has nothing left to cast."""
        return sum(isinstance(part, Cast) for part in self.parts)

    @property
    def is_channels_last(self) -> bool:
        """Whether convolutions run in channels_last that would not have otherwise."""
        return bool(self.restored)

    @property
    def is_compiled(self) -> bool:
        """Whether roots are compiled, and none has failed."""
        return bool(self._compiled) and all(compiled.failure is None for compiled in self._compiled)

    def is_stale(self) -> bool:
        """Tell whether the prefix was thawed, loaded, moved or hooked since: build it again."""
        return any(part.is_stale() for part in self.parts)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the fast prefix in every forward pass of the model inside the block.

        Raises:
            FastPrefixError: at the end of the block, when a convolution was followed by something else
                than its batch norm.
        """
        try:
            with overridden(self.forwards):
                yield
        finally:
            is_right = self.settle()
        if not is_right:
            raise FastPrefixError(
                "Every folded convolution must be followed by its batch norm in inference mode, found one that was "
                "not: the model took another way than when its prefix was tried. Run this batch again without the "
                "fast prefix, and leave it off."
            )

    def settle(self) -> bool:
        """End a forward pass; tell whether all parts did in it what they were made for."""
        settled = [part.settle() for part in self.parts]
        return all(settled)


class _Trials:
    """Tries what may be gained, most first."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._survey = Survey(probe)
        self._plain = self._survey.plain
        self._exact = _Exact.of(probe, self._plain) if self._ulp() > _TOLERANCE else None

    def best(self) -> FastPrefix | None:
        """Return the fastest prefix that computes the same."""
        if not any(True for _ in tree.leaves(self._plain.result)):
            return None  # no tensor to see by who reads what
        pairs = self._survey.without_other_readers(self._survey.pairs)
        found = self._try_channels_last(pairs) if _gain_from_channels_last(pairs) else None
        found = found or self._try(pairs)
        return found or self._try([pair for pair in pairs if self._try([pair])])

    def compiled(self, found: FastPrefix | None) -> FastPrefix | None:
        """Return what was found, or the plain prefix, with its roots compiled; None if that fails."""
        parts, restored = ((), ()) if found is None else (found.parts, found.restored)
        roots = [root for root in self._probe.roots.values() if any(True for _ in root.children())]
        fast = FastPrefix(parts, restored, roots)
        return fast if roots and self._is_right(fast) and fast.is_compiled else None

    def _try_channels_last(self, pairs: Sequence[Pair]) -> FastPrefix | None:
        crossing = self._probe.find_crossing(self._plain)
        fast = FastPrefix(self._parts(pairs, channels_last=True), [self._probe.roots[name] for name in crossing])
        return fast if self._is_right(fast) else None

    def _try(self, pairs: Sequence[Pair]) -> FastPrefix | None:
        fast = FastPrefix(self._parts(pairs))
        return fast if fast.parts and self._is_right(fast) else None

    def _parts(self, pairs: Sequence[Pair], *, channels_last: bool = False) -> list[Part]:
        folds = [
            Fold(
                pair.convolution,
                pair.norm,
                cast_to=pair.cast_to,
                channels_last_for=pair.input_shape if channels_last and len(pair.input_shape) == 3 else None,
            )
            for pair in pairs
        ]
        return [*folds, *(Cast(linear, dtype) for linear, dtype in self._survey.casts.items())]

    def _is_right(self, fast: FastPrefix) -> bool:
        """Run it, note its error, and tell whether it computes the same in the same layouts."""
        try:
            with self._probe.run(fast.forwards) as outcome:
                is_settled = fast.settle()
            exact_error = 0.0 if self._exact is None else self._exact.error(fast, self._names(fast.folded))
        except Exception:  # such as a view that channels_last does not allow; the plain prefix has just run
            fast.settle()
            return False
        fast.error = self._plain.error(outcome, self._names(fast.folded))
        handed_on = self._names(fast.restored)
        same_layouts = self._plain.layouts(handed_on) == outcome.layouts(handed_on)
        return is_settled and same_layouts and exact_error <= _TOLERANCE and fast.error <= self._tolerance()

    def _tolerance(self) -> float:
        if self._ulp() <= _TOLERANCE:
            return _TOLERANCE
        rounding = 0.0 if self._exact is None else self._exact.rounding
        return max(_TOLERANCE_ULP * self._ulp(), _TOLERANCE_OF_ROUNDING * rounding)

    def _ulp(self) -> float:
        """Return that of the lowest precision in the prefix."""
        leaves = [leaf for leaf in tree.leaves(self._plain.of_roots) if leaf.is_floating_point()]
        dtypes = {pair.dtype for pair in self._survey.pairs} | {leaf.dtype for leaf in leaves}
        ulps = [torch.finfo(dtype).eps for dtype in dtypes.union(self._survey.casts.values())]
        tf32 = [_TF32_ULP for leaf in leaves if leaf.is_cuda]  # torch may compute float32 convolutions in it
        return max([*ulps, *tf32], default=0.0)

    def _names(self, modules: Collection[nn.Module]) -> set[str]:
        return {name for name, root in self._probe.roots.items() if root in modules}


@dataclass(frozen=True, slots=True)
class _Exact:
    """What the prefix gives in full precision, where training runs in less."""

    probe: Probe
    plain: Outcome
    rounding: float
    """How far the prefix as trained is from it."""

    @classmethod
    def of(cls, probe: Probe, as_trained: Outcome) -> _Exact | None:
        """Run it; None if the model cannot, or is in low precision without autocast."""
        exact = probe.in_full_precision()
        try:
            with exact.run() as plain:
                pass
        except Exception:  # such as an input in the precision of autocast
            return None
        leaves = (leaf for leaf in tree.leaves(plain.of_roots) if leaf.is_floating_point())
        if any(torch.finfo(leaf.dtype).eps > _TOLERANCE for leaf in leaves):
            return None
        return cls(exact, plain, plain.error(as_trained.in_float32()))

    def error(self, fast: FastPrefix, without: Collection[str]) -> float:
        """Return the error of the fast prefix in full precision."""
        with self.probe.run(fast.forwards) as outcome:
            fast.settle()
        return self.plain.error(outcome, without)


class _Compiled:
    """The compiled forward of a module, and its own from the first failure on."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.failure: Exception | None = None
        self._plain: Forward = root.forward
        self._compiled: Forward | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the one or the other; errors of the module itself come from its own."""
        if self.failure is None:
            try:
                self._compiled = self._compiled or torch.compile(self._plain)
                return self._compiled(*args, **kwargs)
            except Exception as failure:
                self.failure = failure
        return self._plain(*args, **kwargs)


def _gain_from_channels_last(pairs: Sequence[Pair]) -> bool:
    """Tell whether convolutions that now run contiguous would be faster: deterministic, so no measurement.

    On CPU in float32 and bfloat16 (oneDNN; benchmarks/micro/fast_prefix). On CUDA in 16 bits, as
    torch recommends; not measured here.
    """
    layouts = {pair.layout for pair in pairs}
    dtypes = {(pair.device_type, pair.dtype) for pair in pairs}
    fast = {("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16), ("cuda", torch.float16)}
    return "contiguous" in layouts and "channels_last" not in layouts and dtypes <= fast


def _making_contiguous(forward: Forward) -> Forward:
    def made_contiguous(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return output.contiguous() if isinstance(output, Tensor) else tree.map_tensors(Tensor.contiguous, output)

    return made_contiguous
