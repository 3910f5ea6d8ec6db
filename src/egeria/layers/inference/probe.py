"""Running a model as its training does, to see what its prefix can do without; nobody can tell afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.layers.batch import Batch
from egeria.layers.inference.folding import Forward, overridden
from egeria.layers.undisturbed import undisturbed

SAME = 1e-3
"""Relative difference under which two runs count as one: kernels that sum in any order do not differ by more."""


@dataclass(slots=True)
class Outcome:
    """What one forward pass gave."""

    of_roots: dict[str, list[Any]] = field(default_factory=dict)
    """Copies of what each root returned, call by call, in the order of the first calls."""
    result: Any = None
    """What the model returned."""

    def error(self, other: Outcome, without: Iterable[str] = (), *, with_result: bool = False) -> float:
        """Return the largest difference between tensors of two passes, relative to the largest value of the tensor.

        Args:
            other: the other pass.
            without: roots that do not count.
            with_result: whether what the model returned counts too.

        Returns:
            The error; infinity where tensors differ in number, shape, type or in what is not finite.
        """
        names = (self.of_roots.keys() | other.of_roots.keys()) - set(without)
        entries = [(self.of_roots.get(name), other.of_roots.get(name)) for name in names]
        if with_result:
            entries.append((self.result, other.result))
        return max((_error_of_trees(one, two) for one, two in entries), default=0.0)

    def in_float32(self) -> Outcome:
        """Return a copy with tensors of lower precision in float32."""
        return Outcome(*(tree.map_tensors(_widened, entry) for entry in (self.of_roots, self.result)))

    def layouts(self, names: Iterable[str]) -> list[Any]:
        """Return the strides of what these roots and the model returned; of axes of one element there are none."""
        trees = [self.result, *(self.of_roots.get(name) for name in sorted(names))]
        return [
            [stride for stride, size in zip(leaf.stride(), leaf.shape, strict=True) if size > 1]
            for leaf in tree.leaves(trees)
        ]


class Probe:
    """A model, its prefix and a batch that may be run any number of times, always from the same state.

    Args:
        model: the model; the modes of its submodules are those it trains in.
        roots: dotted names of the submodules that are the prefix.
        batch: arguments of a call.
        gradients: whether passes record an autograd graph.
    """

    def __init__(self, model: nn.Module, roots: Sequence[str], batch: Batch, *, gradients: bool = False) -> None:
        self.roots = {name: model.get_submodule(name) for name in roots}
        self._model = model
        self._batch = batch
        self._gradients = gradients
        self._precision: Callable[[], AbstractContextManager[None]] = nullcontext

    def in_full_precision(self) -> Probe:
        """Return a probe that runs the same in the precision of the weights: no autocast, no TF32."""
        exact = replace(self._batch, autocast=replace(self._batch.autocast, enabled=False))
        probe = Probe(self._model, tuple(self.roots), exact, gradients=self._gradients)
        probe._precision = _without_tf32
        return probe

    @contextmanager
    def run(self, forwards: Mapping[nn.Module, Forward] | None = None) -> Iterator[Outcome]:
        """Run the model once, submodules with other `forward`s; inside the block it is as the pass left it."""
        outcome, forwards = Outcome(), dict(forwards or {})
        for name, root in self.roots.items():
            forwards[root] = _recording(forwards.get(root, root.forward), outcome.of_roots, name)
        batch = self._batch.first_rows(None)
        as_trained = undisturbed(self._model, gradients=self._gradients, keeps_modes=True)
        with as_trained, overridden(forwards), batch.autocast.context(), self._precision():
            outcome.result = self._model(*batch.args, **batch.kwargs)
            yield outcome

    def find_crossing(self, plain: Outcome) -> set[str]:
        """Return the roots whose output anything behind the prefix reads.

        Every other root is made to return NaN: first all but the last that is called, which mostly is
        the only one; then, if that shows, each by itself.

        Args:
            plain: what a plain pass gave.
        """
        *others, last = plain.of_roots
        if self._is_clean(plain, set(others)):
            return {last}
        return {name for name in plain.of_roots if not self._is_clean(plain, {name})}

    def _is_clean(self, plain: Outcome, poisoned: set[str]) -> bool:
        stubs = {
            self.roots[name]: _replaying(
                [tree.map_tensors(poison, call) for call in calls] if name in poisoned else calls
            )
            for name, calls in plain.of_roots.items()
        }
        try:
            with self.run(stubs) as outcome:
                return outcome.error(plain, plain.of_roots, with_result=True) <= SAME
        except Exception:  # the model looks at its numbers, and met NaN
            return False


def poison(tensor: Tensor) -> Tensor:
    """Return NaN in the form of a tensor; what is no floating-point tensor as it is."""
    return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor


def _without_tf32() -> AbstractContextManager[None]:
    cudnn: Any = torch.backends.cudnn
    kept = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "deterministic")}
    context: AbstractContextManager[None] = cudnn.flags(allow_tf32=False, **kept)
    return context


def _recording(forward: Forward, into: dict[str, list[Any]], name: str) -> Forward:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        into.setdefault(name, []).append(tree.map_tensors(_copy, output))
        return output

    return recorded


def _replaying(calls: Sequence[Any]) -> Forward:
    waiting = iter(calls)
    return lambda *_args, **_kwargs: tree.map_tensors(_copy, next(waiting))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor


def _error_of_trees(plain: Any, other: Any) -> float:
    ours, theirs = list(tree.leaves(plain)), list(tree.leaves(other))
    if len(ours) != len(theirs):
        return float("inf")
    return max((_relative_error(one, two) for one, two in zip(ours, theirs, strict=True)), default=0.0)


def _relative_error(plain: Tensor, other: Tensor) -> float:
    if plain.shape != other.shape or plain.dtype != other.dtype:
        return float("inf")
    if not plain.is_floating_point():
        return 0.0 if torch.equal(plain, other) else float("inf")
    finite = plain.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return float("inf")
    wide = torch.promote_types(plain.dtype, torch.float32)
    ours, theirs = plain[finite].to(wide), other[finite].to(wide)
    if not ours.numel():
        return 0.0
    return float((ours - theirs).abs().amax() / ours.abs().amax().clamp_min(torch.finfo(wide).tiny))
