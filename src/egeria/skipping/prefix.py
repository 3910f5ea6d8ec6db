"""Skipping the frozen front of a model: what it hands over, recorded once and given back later (paper §4.3)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from egeria import tree
from egeria.errors import UncacheableError
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.layers.shards import without_torch
from egeria.skipping.crossing import (
    Crossing,
    Leaf,
    called,
    check_batch,
    check_prefix,
    check_run,
    refusing,
    replay_difference,
    require,
    stub_template,
)
from egeria.skipping.probe import Probe, difference, find_roots, is_unsettled, tolerance
from egeria.skipping.replay import ActiveStubs, Place, Template, replaying
from egeria.skipping.rows import RowArguments, RowProbe, cut_padding, cuttable_axes, signature

MOST_SIGNATURES = 512
"""Kinds of batches that are remembered, such as lengths to which sentences are padded."""
MOST_KEPT_BYTES = 256 * 2**20
"""Memory for what is the same for every sample, over all kinds of batches."""


class Prefix:
    """The frozen front of one model, and what it hands to the rest. Made by `find`."""

    def __init__(self, probe: Probe, arguments: RowArguments, leaves: Sequence[Leaf], *, can_split: bool) -> None:
        self.leaves = tuple(sorted(leaves, key=lambda leaf: leaf.axis is None))
        self.row_leaves = tuple(leaf for leaf in self.leaves if leaf.axis is not None)
        self.can_split = can_split
        """Whether the frozen layers run on some rows of a batch alone."""
        self._arguments = arguments
        self._templates: OrderedDict[Hashable, Template] = OrderedDict()
        self._look_at(probe)

    def _look_at(self, probe: Probe) -> None:
        self._probe = probe
        kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
        named = [(f"{name}.{key}".strip("."), m) for name, r in probe.roots.items() for key, m in r.named_modules()]
        self._modules = tuple({id(module): module for _, module in named}.values())
        self._modes = tuple((name, module) for name, module in named if isinstance(module, kinds))

    @classmethod
    def find(cls, model: nn.Module, modules: Sequence[LayerModule], batch: Batch, num_rows: int) -> Prefix:
        """Find out what crosses, and prove that it can be stored by sample and given back.

        Leaves no trace in the model; takes some ten forward passes, more where more than the last output crosses.

        Args:
            model: the model, without wrappers around it.
            modules: its frozen layer modules, front to back.
            batch: arguments of a call in training.
            num_rows: how many samples these hold.

        Raises:
            UncacheableError: the frozen layers cannot be skipped; the message is the reason.
        """
        with refusing():
            roots = find_roots(model, modules)
            check_batch(batch)
            check_prefix(model, modules, roots)
            require(num_rows > 1, "a batch of one sample does not show what belongs to a sample")
            arguments = RowArguments.find(batch, num_rows)
            limit = tolerance(batch, next(model.parameters()).device)
            probe = Probe(model, roots)
            other = arguments.take(batch, torch.arange(num_rows).roll(1))
            crossing = Crossing(probe, batch, limit)
            places = crossing.find(modules[-1].tap, other)
            values = crossing.values(places)
            rows = RowProbe(
                probe=probe, batch=batch, num_rows=num_rows, arguments=arguments, values=values, limit=limit
            )
            rows.check_function(other)
            axes, can_split = rows.find_axes()
            require(any(axis is not None for axis in axes.values()), "nothing that crosses belongs to a sample")
            crossing.check_gradients(values)
            lengths = cuttable_axes(rows, axes, crossing.differs) if can_split else {}
            leaves = [Leaf.of(place, axis, values[place], lengths.get(place)) for place, axis in axes.items()]
            prefix = cls(probe, arguments, leaves, can_split=can_split)
            prefix._keep_constants(crossing.template, values)
            prefix._check(other, crossing.template)
            prefix._remember(batch, crossing.template)
            return prefix

    @property
    def model(self) -> nn.Module:
        """The model that it is the front of."""
        return self._probe.model

    def weights(self) -> list[tuple[Mapping[str, Tensor | None], str]]:
        """Return where the frozen layers keep each of their parameters and buffers: a table, and the name in it."""
        tables: list[Mapping[str, Tensor | None]] = []
        for module in self._modules:
            tables += [module._parameters, module._buffers]
        return [(table, name) for table in tables for name in table]

    def is_hooked(self) -> bool:
        """Return whether a forward hook was put on a frozen layer since, which replaying would leave out."""
        return any(without_torch(module._forward_hooks) for module in self._modules)

    def fits(self, batch: Batch, rows: Sequence[Tensor]) -> bool:
        """Return whether rows [B, ...] have the shapes that a batch of a known kind needs."""
        template = self._templates.get(_key(batch))
        if template is None or len(rows) != len(self.row_leaves):
            return False
        forms = [template.forms[leaf.place].shape for leaf in self.row_leaves]
        wanted = [_axis_first(shape, leaf.axis or 0) for shape, leaf in zip(forms, self.row_leaves, strict=True)]
        return [tuple(stored.shape) for stored in rows] == wanted

    def knows(self, batch: Batch) -> bool:
        """Return whether a batch of this kind was tried out, so that stubs know their shapes."""
        return _key(batch) in self._templates

    def learn(self, batch: Batch) -> None:
        """Try out a batch of another kind: its shapes, and that replaying gives what computing gives.

        Raises:
            UncacheableError: it does not.
        """
        if self.knows(batch):
            return
        with refusing():
            check_batch(batch)
            num_rows = self._arguments.count(batch)
            trial = self._probe.run(batch, keeps={leaf.root for leaf in self.leaves})
            check_run(trial)
            template, _ = stub_template(trial, tuple(self._probe.roots))
            known = next(iter(self._templates.values()))
            for root in {*known.roots} ^ {*template.roots}:
                raise UncacheableError(f"{called(trial, root)} in another kind of batch, and not so at first")
            for leaf in self.leaves:
                self._check_form(leaf, template, num_rows)
            template.materialised = known.materialised
            values = {leaf.place: trial.seen.value(leaf.place) for leaf in self.leaves}
            self._keep_constants(template, values)
            self._check(batch, template)
            if num_rows > 1 and self._has_constants(template):
                self._check(self._arguments.take(batch, torch.arange(num_rows).roll(1)), template)
            self._remember(batch, template)

    @contextmanager
    def recording(self, batch: Batch | None = None) -> Iterator[Recording]:
        """Watch the user's own forward pass in the block; `Recording.rows` has then what crossed.

        Args:
            batch: arguments of that pass; a pass of another kind than those tried out may be recorded too.
        """
        known = None if batch is None else self._templates.get(_key(batch))
        template = known or next(reversed(self._templates.values()))
        recording = Recording(self.row_leaves, template, self._modes)
        handles = []
        try:
            for root in template.roots:
                handles.append(watch(recording, root, self._probe.roots[root]))
            yield recording
        finally:
            for handle in handles:
                handle.remove()

    def compute(self, batch: Batch, rows: Tensor | None = None) -> list[Tensor]:
        """Run the frozen layers alone, without a trace.

        Args:
            batch: arguments of a call; left as they are.
            rows: numbers of the rows to compute [b], or None for all.

        Returns:
            What crosses, one tensor [b, ...] for each of `row_leaves`.

        Raises:
            UncacheableError: they did not run as they did when they were tried out.
        """
        with refusing():
            some = rows is not None and self.can_split
            part = self._arguments.take(batch, rows) if some and rows is not None else batch
            places = [leaf.place for leaf in self.row_leaves]
            with self._probe.session():  # with gradients on, as in training: some layers (LSTM) run another way without
                trial = self._probe.outputs(part, places)
            if trial.error is not None:
                raise trial.error
            for leaf in self.row_leaves:
                require(trial.seen.calls.get(leaf.root) == 1, f"{called(trial, leaf.root)}, and once when tried out")
            found = [trial.seen.value(leaf.place).movedim(leaf.axis or 0, 0) for leaf in self.row_leaves]
            return found if some or rows is None else [value[rows.to(value.device)] for value in found]

    def replaying(self, rows: Sequence[Tensor], batch: Batch) -> AbstractContextManager[ActiveStubs]:
        """Return a block in which the next forward pass of the model skips the frozen layers.

        Args:
            rows: what crosses, one tensor [B, ...] for each of `row_leaves`, on any device; copied.
            batch: arguments of that pass, of a known kind.

        Raises:
            UncacheableError: the batch is of an unknown kind, or the rows do not fit it. At the end of the block: a
                frozen layer was not called once; the pass is over then, and its output not to be trusted.
        """
        key = _key(batch)
        template = self._templates.get(key)
        require(template is not None, "a batch of this kind was never tried out")
        assert template is not None
        self._templates.move_to_end(key)
        return replaying(self._probe.model, template, self._in_place(rows, template))

    def error(self, computed: Sequence[Tensor], rows: Sequence[Tensor], lengths: Sequence[int] | None = None) -> float:
        """Return the largest difference between stored rows and what the frozen layers compute now.

        Relative to the largest value of each tensor; infinite where shapes differ or one is not finite.

        Args:
            computed: what crosses, one tensor [B, ...] for each of `row_leaves`.
            rows: the same from the store.
            lengths: of the samples [B], where rows have lengths: what is behind them does not count.
        """
        largest = 0.0
        for leaf, stored, own in zip(self.row_leaves, rows, computed, strict=True):
            pair = [stored.to(own.device, own.dtype), own]
            if lengths is not None and leaf.length_axis is not None and stored.shape == own.shape:
                pair = [cut_padding(side, leaf.length_axis, lengths) for side in pair]
            largest = max(largest, difference(*pair))
        return largest

    def _in_place(self, rows: Sequence[Tensor], template: Template) -> dict[Place, Tensor]:
        """Return copies of rows in the form that computing gives them."""
        values = {}
        for leaf, stored in zip(self.row_leaves, rows, strict=True):
            value = template.forms[leaf.place].empty()
            target = value.movedim(leaf.axis or 0, 0)
            require(
                stored.shape == target.shape,
                f"rows for {leaf.root} must have the shape {tuple(target.shape)}, found {tuple(stored.shape)}",
            )
            target.copy_(stored, non_blocking=True)
            values[leaf.place] = value
        return values

    def _check(self, batch: Batch, template: Template) -> None:
        """Make sure that a whole pass with replayed outputs does what a computed one does."""
        trial = self._probe.run(batch, keeps={leaf.root for leaf in self.row_leaves})
        check_run(trial)
        assert trial.outcome is not None
        values = {leaf.place: trial.seen.value(leaf.place) for leaf in self.row_leaves}
        limit = tolerance(batch, next(self._probe.model.parameters()).device)
        differing = replay_difference(self._probe, batch, template, values, trial.outcome, limit=limit)
        require(not differing, f"with the outputs of the frozen layers replayed, {differing} differs in another batch")

    def _check_form(self, leaf: Leaf, template: Template, num_rows: int) -> None:
        form = template.forms.get(leaf.place)
        fits = form is not None and form.dtype == leaf.dtype
        if fits and form is not None and leaf.axis is not None:
            fits = len(form.shape) == len(leaf.shape) + 1 and form.shape[leaf.axis] == num_rows
        require(fits, f"{leaf.root} gives something of another kind in another kind of batch")

    def _has_constants(self, template: Template) -> bool:
        """Return whether anything but rows comes from the batch that was tried out."""
        return len(self.leaves) > len(self.row_leaves) or template.has_integers

    def _keep_constants(self, template: Template, values: Mapping[Place, Tensor]) -> None:
        for leaf in self.leaves:
            if leaf.axis is None:
                template.keep(leaf.place, values[leaf.place])

    def _remember(self, batch: Batch, template: Template) -> None:
        self._templates[_key(batch)] = template
        while len(self._templates) > 1 and (
            len(self._templates) > MOST_SIGNATURES
            or sum(known.kept_bytes for known in self._templates.values()) > MOST_KEPT_BYTES
        ):
            self._templates.popitem(last=False)


def _axis_first(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (shape[axis], *shape[:axis], *shape[axis + 1 :])


def _key(batch: Batch) -> Hashable:
    """Return what batches of one kind have in common."""
    return signature(batch.args, batch.kwargs), batch.autocast


class Recording:
    """What hooks on the frozen layers saw of the user's own forward pass.

    Args:
        leaves: the tensors to record.
        template: the roots, each called once, and the kinds of what they give.
        modes: submodules whose mode matters, by name.
    """

    def __init__(self, leaves: Sequence[Leaf], template: Template, modes: Sequence[tuple[str, nn.Module]]) -> None:
        self._leaves, self._modes = tuple(leaves), modes
        self._roots, self._forms = template.roots, template.forms
        self._calls: dict[str, int] = {}
        self._values: dict[Place, Tensor] = {}
        self._unfit = ""

    def rows(self) -> list[Tensor]:
        """Return what crossed, one tensor [B, ...] for each of the prefix's `row_leaves`; copies.

        Raises:
            UncacheableError: the frozen layers did not run as they did when they were tried out.
        """
        for root in self._roots:
            number = self._calls.get(root, 0)
            require(number == 1, f"{root} was called {number} times in a forward pass, and once when it was tried out")
        require(not self._unfit, self._unfit)
        unsettled = next((name for name, module in self._modes if is_unsettled(module)), "")
        require(not unsettled, f"{unsettled} is in training mode, and was in inference mode when it was tried out")
        return [self._values[leaf.place].movedim(leaf.axis or 0, 0) for leaf in self._leaves]

    def note(self, root: str, output: Any) -> None:
        """Take what a root gave."""
        self._calls[root] = self._calls.get(root, 0) + 1
        tensors = list(tree.leaves(output))
        for leaf in self._leaves:
            if leaf.root != root:
                continue
            form = self._forms[leaf.place]
            value = tensors[leaf.index] if leaf.index < len(tensors) else None
            if value is None or value.dim() != len(form.shape) or value.dtype != form.dtype:
                self._unfit = f"{root} gave something of another kind than when it was tried out"
            elif value.requires_grad:
                self._unfit = f"what {root} gives needs a gradient now: something in front of it is in training"
            else:
                self._values[leaf.place] = value.detach().clone()  # an in-place operation behind may overwrite it


def watch(recording: Recording, name: str, root: nn.Module) -> RemovableHandle:
    """Let a recording see what a root gives, until the handle is removed."""
    return root.register_forward_hook(partial(_note, recording, name))


# A function of this file, not a closure: some models copy themselves in their forward pass.


def _note(recording: Recording, root: str, _module: nn.Module, _args: Any, output: Any) -> None:
    recording.note(root, output)
