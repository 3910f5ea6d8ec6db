"""What crosses from the frozen layers to the rest: found by poisoning (issue 4).

Frozen submodules are replaced by stubs for one forward pass. Where a stub gives NaN instead of its
output and all that the pass does stays the same, nobody behind the prefix reads that output.
Also: why frozen layers cannot be skipped, as far as that is known before a trial run and after one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from egeria.errors import EgeriaError, UncacheableError
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.skipping.probe import PassOutcome, Probe, Trial, gradients_agree
from egeria.skipping.replay import Place, Template, can_be_poisoned

Values = Mapping[Place, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One tensor of what crosses from the frozen layers to the rest."""

    root: str
    """Dotted name of the submodule that gives it."""
    index: int
    """Which of the tensors in that submodule's output."""
    axis: int | None
    """Its batch axis; None if it is the same for every sample: that is kept in memory and not stored."""
    shape: tuple[int, ...]
    """Of one row, the batch axis removed, at the probe."""
    dtype: torch.dtype
    length_axis: int | None
    """Axis of the row that follows the length of the sequence; None if padding must not be cut."""

    @classmethod
    def of(cls, place: Place, axis: int | None, value: Tensor, length_axis: int | None) -> Leaf:
        """Describe the tensor at a place."""
        shape = tuple(size for dim, size in enumerate(value.shape) if dim != axis)
        return cls(root=place[0], index=place[1], axis=axis, shape=shape, dtype=value.dtype, length_axis=length_axis)

    @property
    def place(self) -> Place:
        """Where it is found."""
        return self.root, self.index


class Crossing:
    """Looks for what crosses in one batch.

    Args:
        probe: runs the model.
        batch: the batch.
        limit: relative difference that counts as rounding.

    Raises:
        UncacheableError: the frozen layers cannot be skipped.
    """

    def __init__(self, probe: Probe, batch: Batch, limit: float) -> None:
        self._probe, self._batch, self._limit = probe, batch, limit
        self.base = probe.run(batch)
        check_run(self.base)
        assert self.base.outcome is not None
        self._outcome: PassOutcome = self.base.outcome
        self.template, self.live = stub_template(self.base, tuple(probe.roots))
        reasons = " and ".join(called(self.base, root) for root in self.live[:3])
        require(bool(self.template.roots), f"there is nothing to skip: {reasons}")

    def find(self, tap: str, other: Batch | None) -> tuple[Place, ...]:
        """Return which tensors cross, in the order of their calls.

        Args:
            tap: name of the submodule that gives the output of the last frozen module: mostly all that crosses.
            other: a batch alike with other values, to tell constants among integers.

        Raises:
            UncacheableError: no set of outputs makes up for the frozen layers.
        """
        everything = [place for place in self.template.forms if can_be_poisoned(self.template.blank(place))]
        group = [place for place in everything if place[0] == tap]
        values = self._record({tap}, group) if group else {}
        if not group or self.differs(values):
            group, values = everything, self._record({root for root, _ in everything}, everything)
            self._require_replay(values)
        found = self._needed(group, values)
        found += self._integers({place: values[place] for place in found}, other)
        require(bool(found), "no tensor that the frozen layers give is read by the rest of the model")
        kept = self._record({root for root, _ in found}, found)
        difference = self.differs(kept)
        require(not difference, f"without the frozen layers {difference} differs, whichever of their outputs are kept")
        return tuple(found)

    def check_gradients(self, values: Values) -> None:
        """Make sure that the backward pass is the same, and leaves the frozen layers alone.

        Raises:
            UncacheableError: it is not.
        """
        computed = self._probe.run(self._batch, gradients=True)
        again = next(iter(computed.seen.again), None)
        require(
            again is None,
            f"the backward pass runs {again} again, from inputs that are skipped: let no checkpointed section reach "
            f"over the boundary of the frozen layers",
        )
        replayed = self._probe.run(self._batch, template=self.template, values=values, gradients=True)
        fine = computed.error is None and replayed.error is None
        require(
            fine and gradients_agree(replayed.gradients, computed.gradients, 10 * self._limit),
            "the gradients of the rest of the model differ without the frozen layers",
        )

    def values(self, places: Sequence[Place]) -> dict[Place, Tensor]:
        """Return what is at these places when the batch is computed."""
        return self._record({root for root, _ in places}, places)

    def _record(self, roots: set[str], places: Sequence[Place]) -> dict[Place, Tensor]:
        seen = self._probe.run(self._batch, keeps=roots).seen
        return {place: seen.value(place) for place in places}

    def differs(self, values: Values) -> str:
        """Return the name of what differs when these outputs are replayed and all others poisoned, or ''."""
        return replay_difference(self._probe, self._batch, self.template, values, self._outcome, limit=self._limit)

    def _require_replay(self, values: Values) -> None:
        """With all outputs replayed the pass must be the same, else the frozen layers do more than give outputs."""
        difference = self.differs(values)
        if not difference:
            return
        twice = [root for root in self.live if self.base.seen.calls.get(root)]
        if "cache" in difference or "past_key_values" in difference:
            raise UncacheableError(
                f"the frozen layers fill a key-value cache beside their outputs ({difference}); call the model with "
                f"use_cache=False"
            )
        if twice:
            raise UncacheableError(f"{called(self.base, twice[0])}, and the rest of the model reads more than one call")
        raise UncacheableError(
            f"the frozen layers do more than return their outputs: with these given back instead, {difference} differs"
        )

    def _needed(self, group: list[Place], values: Values) -> list[Place]:
        """Return the places of a group that change the pass when they are poisoned, by halves."""
        outside = {place: value for place, value in values.items() if place not in group}
        if not group or not self.differs(outside):
            return []
        if len(group) == 1:
            return group
        middle = len(group) // 2
        return [*self._needed(group[:middle], values), *self._needed(group[middle:], values)]

    def _integers(self, values: Values, other: Batch | None) -> list[Place]:
        """Return the places of tensors without a NaN that vary with the batch and are read."""
        places = [place for place in self.template.forms if not can_be_poisoned(self.template.blank(place))]
        if not places or other is None:
            return []
        trial = self._probe.run(other, keeps={root for root, _ in places})
        check_run(trial)
        found = []
        for place in places:
            value, own = trial.seen.value(place), self.template.blank(place)
            require(value.shape == own.shape, f"the size of what {place[0]} gives depends on what is in the batch")
            if not torch.equal(value, own) and self.differs({**values, place: value}):
                found.append(place)
        return found


def stub_template(trial: Trial, roots: Sequence[str]) -> tuple[Template, tuple[str, ...]]:
    """Return the template of the roots that a pass called once, and the names of the others: they stay live."""
    live = tuple(root for root in roots if trial.seen.calls.get(root, 0) != 1)
    for root in live:
        if root in trial.seen.calls:
            trial.seen.template.drop(root)
    return trial.seen.template, live


def replay_difference(
    probe: Probe, batch: Batch, template: Template, values: Values, computed: PassOutcome, *, limit: float
) -> str:
    """Replay a pass, and return the name of the first thing that differs from the computed one, or ''.

    Poison takes no memory at first; operations that write into it need some.
    """
    trial = probe.run(batch, template=template, values=values)
    if trial.error is not None and not template.materialised:
        template.materialised = True
        trial = probe.run(batch, template=template, values=values)
        template.materialised = trial.error is None
    if trial.outcome is None:
        return f"the pass fails ({type(trial.error).__name__}), and nothing"
    return trial.outcome.first_difference(computed, limit)


def require(condition: bool, reason: str) -> None:
    """Refuse for a reason.

    Raises:
        UncacheableError: the condition does not hold.
    """
    if not condition:
        raise UncacheableError(reason)


@contextmanager
def refusing() -> Iterator[None]:
    """Turn whatever goes wrong in a trial, such as a lack of memory, into a refusal.

    Raises:
        UncacheableError: something went wrong in the block.
    """
    try:
        yield
    except EgeriaError:
        raise
    except Exception as error:
        raise UncacheableError(f"a trial run of the frozen layers failed with {_tell(error)}") from error


def check_prefix(model: nn.Module, modules: Sequence[LayerModule], roots: Mapping[str, nn.Module]) -> None:
    """Make sure that nothing about the frozen layers forbids to skip them.

    Raises:
        UncacheableError: they train, are hooked or compiled.
    """
    names = [name for module in modules for name in module.parameters]
    inside = [f"{name}.{key}".strip(".") for name, root in roots.items() for key, _ in root.named_parameters()]
    own = dict(model.named_parameters(remove_duplicate=False))
    trained = next((name for name in [*names, *inside] if own[name].requires_grad), None)
    require(
        trained is None,
        f"{trained} is in training still, and what the frozen layers give changes with it; if it is tied to a "
        f'layer behind them, set freezing.tied = "freeze"',
    )
    for name, module in _covered(model, roots):
        hooks = [*module._forward_hooks.values()]
        require(
            not hooks,
            f"there is a forward hook on {name}, which would read what stands in for skipped layers; remove it "
            f"({getattr(hooks[0], '__qualname__', type(hooks[0]).__qualname__) if hooks else ''})",
        )
    for name, module in model.named_modules():
        is_around = not name or any(root == name or root.startswith(name + ".") for root in roots)
        is_compiled = module._compiled_call_impl is not None or isinstance(module, torch.jit.ScriptModule)
        require(
            not (is_around and (is_compiled or "_orig_mod" in module._modules)),
            f"{name or 'the model'} is compiled, so that no frozen layer in it can be left out; compile the parts "
            f"that stay in training",
        )


def check_batch(batch: Batch) -> None:
    """Make sure that no gradient is wanted in front of the model.

    Raises:
        UncacheableError: one is.
    """
    require(
        not batch.needs_grad,
        "something in front of the model is in training, so the boundary needs a gradient",
    )


def check_runs_once() -> None:
    """Make sure that the pass under way is not run again for its gradients, as activation checkpointing does.

    Both runs must save the same tensors, so that neither may skip what the other computes. They are told by hooks
    on saved tensors, which offloading sets too.

    Raises:
        UncacheableError: it may be.
    """
    require(
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        "the whole model is called under activation checkpointing or other hooks on saved tensors, which may run it "
        "twice; checkpoint the parts that stay in training",
    )


def check_run(trial: Trial) -> None:
    """Make sure that a run of the whole model shows nothing that forbids to skip its frozen layers.

    Raises:
        UncacheableError: it does.
    """
    seen = trial.seen
    if trial.outcome is None:
        raise UncacheableError(f"the model cannot be run on one batch again: {_tell(trial.error)}")
    require(
        not seen.needs_grad,
        f"what {next(iter(seen.needs_grad), '')} gives needs a gradient: something in front of it is in training",
    )
    name, kind = next(iter(seen.unsettled.items()), ("", ""))
    require(not kind, f"a {kind} in {name} is in training mode, so that a sample gives something else each time")
    require(
        not seen.opaque,
        f"{next(iter(seen.opaque), '')} gives an object of its own with tensors inside, which cannot be stored; "
        f"return tensors, tuples or dictionaries",
    )
    require(
        not trial.changed,
        f"the frozen layers set {next(iter(trial.changed), '')} in every forward pass, and whatever reads it would "
        f"find an old value",
    )
    require(trial.outcome.is_finite, "the output of the model has NaN in it")


def called(trial: Trial, root: str) -> str:
    """Return how often a root was called, as words for a reason."""
    number = trial.seen.calls.get(root, 0)
    return f"{root} is called {number} times in a forward pass" if number else f"{root} is not called"


def _tell(error: Exception | None) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _covered(model: nn.Module, roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are frozen whole: the roots, what is in them, and containers of nothing else."""
    inside = {id(module) for root in roots.values() for module in root.modules()}
    for name, module in model.named_modules():
        parts = [part for part in module.modules() if not any(True for _ in part.children())]
        if all(id(part) in inside for part in parts):
            yield name, module
