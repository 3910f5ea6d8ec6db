"""What crosses from the frozen layers to the rest: found by poisoning (issue 4).

Frozen submodules are replaced by stubs for one forward pass. Where a stub gives NaN instead of its
output and all that the pass does stays the same, nobody behind the prefix reads that output.
Also: why frozen layers cannot be skipped, as far as that is known before a trial run and after one.
Whatever forbids it is raised as an `UncacheableError` with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from egeria.errors import EgeriaError, UncacheableError
from egeria.model.batch import Batch
from egeria.model.copies import is_ours
from egeria.model.cut import LayerModule
from egeria.skipping.probe import Probe, Trial, first_difference, gradients_agree
from egeria.skipping.replay import Place, Template, Values


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One tensor of what crosses from the frozen layers to the rest."""

    place: Place
    axis: int | None
    """Its batch axis; None if it is the same for every sample: that is kept in memory and not
    stored."""
    shape: tuple[int, ...]
    """Of one row, the batch axis removed, at the probe."""
    dtype: torch.dtype
    length_axis: int | None
    """Axis of the row that follows the length of the sequence; None if padding must not be cut."""


class Crossing:
    """What crosses in one batch; `other` is alike with other values, to tell constants among
    integers.

    Mostly all that crosses is the output of `tap`, which is that of the last frozen module. A
    relative difference up to `limit` counts as rounding.
    """

    values: dict[Place, Tensor]
    """The tensors that cross, in the order of their calls."""

    def __init__(self, probe: Probe, batch: Batch, other: Batch, tap: str, limit: float) -> None:
        self.probe, self.batch, self.limit = probe, batch, limit
        self._base = probe.run(batch)
        self._outcome = check_run(self._base)
        self.template, self._live = stub_template(self._base, probe)
        reasons = " and ".join(self._base.called(root) for root in self._live[:3])
        require(bool(self.template.roots), f"there is nothing to skip: {reasons}")
        self.values = self._record(self._find(tap, other))
        require(
            bool(self.values),
            "no tensor that the frozen layers give is read by the rest of the model",
        )
        differing = self.differs(self.values)
        require(
            not differing,
            f"without the frozen layers {differing} differs, whichever of their outputs are kept",
        )

    def differs(self, values: Values) -> str:
        """Return the name of what differs when these outputs are replayed and all others poisoned,
        or ''.
        """
        return replay_difference(
            self.probe, self.batch, self.template, values, self._outcome, limit=self.limit
        )

    def check_gradients(self) -> None:
        """Make sure that the backward pass is the same, and leaves the frozen layers alone."""
        computed = self.probe.run(self.batch, gradients=True)
        require(
            not computed.again,
            f"the backward pass runs {computed.again} again, from inputs that are skipped: let no "
            "checkpointed section "
            f"reach over the boundary of the frozen layers",
        )
        replayed = self.probe.run(
            self.batch, template=self.template, values=self.values, gradients=True
        )
        fine = computed.error is None and replayed.error is None
        require(
            fine and gradients_agree(replayed.gradients, computed.gradients, 10 * self.limit),
            "the gradients of the rest of the model differ without the frozen layers",
        )

    def _find(self, tap: str, other: Batch) -> list[Place]:
        """Return which tensors cross."""
        everything = [place for place, form in self.template.forms.items() if form.can_be_poisoned]
        group = [place for place in everything if place[0] == tap]
        values = self._record(group)
        if not group or self.differs(values):
            group, values = everything, self._record(everything)
            self._require_replay(values)
        found = self._needed(group, values)
        return found + self._integers({place: values[place] for place in found}, other)

    def _record(self, places: Collection[Place]) -> dict[Place, Tensor]:
        found = self.probe.run(self.batch, keeps=places).values if places else {}
        return {place: found[place] for place in places}

    def _require_replay(self, values: Values) -> None:
        """With all outputs replayed the pass must be the same, else the frozen layers do more than
        give outputs.
        """
        differing = self.differs(values)
        if not differing:
            return
        if "cache" in differing or "past_key_values" in differing:
            raise UncacheableError(
                f"the frozen layers fill a key-value cache beside their outputs ({differing}); "
                "call the model with "
                f"use_cache=False"
            )
        for root in self._live:
            if root in self._base.calls:
                raise UncacheableError(
                    f"{self._base.called(root)}, and the rest of the model reads more than one call"
                )
        raise UncacheableError(
            "the frozen layers do more than return their outputs: with these given back instead, "
            f"{differing} differs"
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

    def _integers(self, values: Values, other: Batch) -> list[Place]:
        """Return the places of tensors without a NaN that vary with the batch and are read."""
        places = [place for place, form in self.template.forms.items() if not form.can_be_poisoned]
        if not places:
            return []
        trial = self.probe.run(other, keeps=places)
        check_run(trial)
        found = []
        for place in places:
            value, own = trial.values[place], self.template.blank(place)
            require(
                value.shape == own.shape,
                f"the size of what {place[0]} gives depends on what is in the batch",
            )
            if not torch.equal(value, own) and self.differs({**values, place: value}):
                found.append(place)
        return found


def stub_template(trial: Trial, probe: Probe) -> tuple[Template, list[str]]:
    """Return the template of the roots that a pass called once, and the names of the others: they
    stay live.
    """
    live = [root for root in probe.roots if trial.calls.get(root) != 1]
    for root in live:
        if root in trial.calls:
            trial.template.drop(root)
    return trial.template, live


def replay_difference(
    probe: Probe,
    batch: Batch,
    template: Template,
    values: Values,
    computed: Mapping[str, Any],
    *,
    limit: float,
) -> str:
    """Replay a pass, and return the name of the first thing that differs from the computed one, or
    ''.

    Poison takes no memory at first; operations that write into it need some.
    """
    trial = probe.run(batch, template=template, values=values)
    if trial.error is not None and not template.materialised:
        template.materialised = True
        trial = probe.run(batch, template=template, values=values)
        template.materialised = trial.error is None
    if trial.outcome is None:
        return f"the pass fails ({type(trial.error).__name__}), and nothing"
    return first_difference(trial.outcome, computed, limit)


def require(condition: bool, reason: str) -> None:
    """Refuse for a reason, as an `UncacheableError`, where a condition does not hold."""
    if not condition:
        raise UncacheableError(reason)


@contextmanager
def refusing() -> Iterator[None]:
    """Turn whatever goes wrong in a trial, such as a lack of memory, into a refusal
    (`UncacheableError`).
    """
    try:
        yield
    except EgeriaError:
        raise
    except Exception as error:
        raise UncacheableError(
            f"a trial run of the frozen layers failed with {_tell(error)}"
        ) from error


def find_roots(model: nn.Module, modules: Sequence[LayerModule]) -> dict[str, nn.Module]:
    """Return the submodules of frozen layer modules by name, each once; none may train, be hooked
    or compiled.
    """
    names = {name: model.get_submodule(name) for module in modules for name in module.submodules}
    first = {root: name for name, root in reversed(names.items())}
    roots = {name: root for name, root in names.items() if first[root] == name}
    inside = [
        f"{name}.{key}".strip(".")
        for name, root in roots.items()
        for key, _ in root.named_parameters()
    ]
    own = dict(model.named_parameters(remove_duplicate=False))
    listed = (name for module in modules for name in module.parameters)
    trained = next((name for name in [*listed, *inside] if own[name].requires_grad), None)
    require(
        trained is None,
        f"{trained} is in training still, and what the frozen layers give changes with it; if it "
        "is tied to a layer behind them, untie it, or set its requires_grad to False",
    )
    for name, hook in _hooks(model, roots.values()):
        raise UncacheableError(
            f"there is a forward hook on {name}, which would read what stands in for skipped "
            "layers; remove it "
            f"({getattr(hook, '__qualname__', type(hook).__qualname__)})"
        )
    for name, module in model.named_modules():
        is_around = not name or any(f"{root}.".startswith(f"{name}.") for root in roots)
        is_compiled = module._compiled_call_impl is not None or isinstance(
            module, torch.jit.ScriptModule
        )
        require(
            not (is_around and (is_compiled or "_orig_mod" in module._modules)),
            f"{name or 'the model'} is compiled, so that no frozen layer in it can be left out; "
            "compile the parts "
            f"that stay in training",
        )
    return roots


def check_runs_once() -> None:
    """Make sure that the pass under way is not run again for its gradients, as activation
    checkpointing does.

    Both runs must save the same tensors, so that neither may skip what the other computes. They are
    told by hooks on saved tensors, which offloading sets too.

    Raises:
        UncacheableError: it may be.
    """
    require(
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
        "the whole model is called under activation checkpointing or other hooks on saved "
        "tensors, which may run it "
        "twice; checkpoint the parts that stay in training",
    )


def check_run(trial: Trial) -> dict[str, Any]:
    """Return the outcome of a run of the whole model, which must show nothing that forbids to skip
    frozen layers.
    """
    if trial.outcome is None:
        raise UncacheableError(f"the model cannot be run on one batch again: {_tell(trial.error)}")
    changed = next(iter(trial.changed), "")
    reasons = {
        "what {} gives needs a gradient: something in front of it is in training": trial.needs_grad,
        "a {} is in training mode, so that a sample gives something else each "
        "time": trial.unsettled,
        "{} gives an object of its own with tensors inside, which cannot be stored; return "
        "tensors, tuples or "
        "dictionaries": trial.opaque,
        "the frozen layers set {} in every forward pass, and whatever reads it would find an old "
        "value": changed,
    }
    for reason, name in reasons.items():
        require(not name, reason.format(name))
    require(trial.is_finite, "the output of the model has NaN in it")
    return trial.outcome


def _tell(error: Exception | None) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _hooks(model: nn.Module, roots: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the forward hooks on frozen layers, and on containers of some, but not on the model
    itself.
    """
    inside = {module for root in roots for module in root.modules()}
    for name, module in model.named_modules():
        if module is not model and any(part in inside for part in module.modules()):
            yield from (
                (name, hook) for hook in module._forward_hooks.values() if not is_ours(hook)
            )
