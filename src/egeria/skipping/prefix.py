"""Skipping the frozen front of a model: what it hands over, recorded once and given back later (paper §4.3)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from egeria.errors import UncacheableError
from egeria.layers.batch import Batch
from egeria.layers.copies import is_ours
from egeria.layers.modules import LayerModule
from egeria.layers.shards import without_torch
from egeria.skipping.crossing import (
    Crossing,
    Leaf,
    check_run,
    find_roots,
    refusing,
    replay_difference,
    require,
    stub_template,
)
from egeria.skipping.probe import Probe, Trial, difference, tolerance
from egeria.skipping.replay import Place, Template, Values, replaying
from egeria.skipping.rows import RowArguments, check_function, cut_padding, cuttable_axes, find_axes, signature

MOST_SIGNATURES = 512
"""Kinds of batches that are remembered, such as lengths to which sentences are padded."""
KINDS_TRIED = 3
"""Kinds of batches that are tried out in full before others are taken to be like them."""
MOST_KEPT_BYTES = 256 * 2**20
"""Memory for what is the same for every sample, over all kinds of batches."""


class Prefix:
    """The frozen front of one model, and what it hands to the rest. Made by `find`."""

    def __init__(self, probe: Probe, arguments: RowArguments, leaves: Sequence[Leaf], *, can_split: bool) -> None:
        self.model = probe.model
        self.leaves = tuple(sorted(leaves, key=lambda leaf: leaf.axis is None))
        self.row_leaves = tuple(leaf for leaf in self.leaves if leaf.axis is not None)
        self.can_split = can_split
        """Whether the frozen layers run on some rows of a batch alone."""
        self._probe = probe
        self._arguments = arguments
        self._templates: OrderedDict[Hashable, Template] = OrderedDict()
        self._num_tried = 1
        self._modules = tuple(dict.fromkeys(module for root in probe.roots.values() for module in root.modules()))

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
            _check_batch(batch)
            probe = Probe(model, find_roots(model, modules))
            require(num_rows > 1, "a batch of one sample does not show what belongs to a sample")
            arguments = RowArguments.find(batch, num_rows)
            other = arguments.rolled(batch)
            limit = tolerance(batch, next(model.parameters()).device)
            crossing = Crossing(probe, batch, other, modules[-1].tap, limit)
            check_function(crossing, other)
            axes, can_split = find_axes(crossing, arguments)
            require(any(axis is not None for axis in axes.values()), "nothing that crosses belongs to a sample")
            crossing.check_gradients()
            lengths = cuttable_axes(crossing, arguments, axes) if can_split else {}
            leaves = [_leaf(place, axes[place], value, lengths) for place, value in crossing.values.items()]
            prefix = cls(probe, arguments, leaves, can_split=can_split)
            prefix._keep_constants(crossing.template, crossing.values)
            prefix._check(other, crossing.template)
            prefix._remember(batch, crossing.template)
            return prefix

    def weights(self) -> list[tuple[Mapping[str, Tensor | None], str]]:
        """Return where the frozen layers keep each of their parameters and buffers: a table, and the name in it."""
        tables = [table for module in self._modules for table in (module._parameters, module._buffers)]
        return [(table, name) for table in tables for name in table]

    def is_hooked(self) -> bool:
        """Return whether a forward hook was put on a frozen layer since, which replaying would leave out."""
        hooks = (hook for module in self._modules for hook in without_torch(module._forward_hooks).values())
        return any(not is_ours(hook) for hook in hooks)

    def fits(self, batch: Batch, rows: Sequence[Tensor]) -> bool:
        """Return whether rows [B, ...] have the shapes that a batch of a known kind needs."""
        template = self._templates.get(_key(batch))
        if template is None or len(rows) != len(self.row_leaves):
            return False
        return all(_shape(leaf, template) == own.shape for leaf, own in zip(self.row_leaves, rows, strict=True))

    def knows(self, batch: Batch) -> bool:
        """Return whether a batch of this kind was tried out, so that stubs know their shapes."""
        return _key(batch) in self._templates

    def learn(self, batch: Batch) -> None:
        """Try out a batch of another kind: its shapes, and that replaying gives what computing gives (or refuse)."""
        if self.knows(batch):
            return
        with refusing():
            _check_batch(batch)
            num_rows = self._arguments.count(batch)
            trial = self._probe.run(batch, keeps=[leaf.place for leaf in self.leaves])
            check_run(trial)
            template, _ = stub_template(trial, self._probe)
            known = next(iter(self._templates.values()))
            for root in {*known.roots} ^ {*template.roots}:
                raise UncacheableError(f"{trial.called(root)} in another kind of batch, and not so at first")
            for leaf in self.leaves:
                fits = _is_like(leaf, template, num_rows)
                require(fits, f"{leaf.place[0]} gives something of another kind in another kind of batch")
            template.materialised = known.materialised
            self._keep_constants(template, trial.values)
            self._check(batch, template)
            has_integers = not all(form.can_be_poisoned for form in template.forms.values())
            if num_rows > 1 and (has_integers or len(self.leaves) > len(self.row_leaves)):
                self._check(self._arguments.rolled(batch), template)  # with what was kept of another batch
            self._remember(batch, template)
            self._num_tried += 1

    def learn_from(self, trial: Trial, batch: Batch) -> None:
        """Learn a kind of batch from a recorded pass of it; try it out where few kinds were, or more is to be seen.

        Once some kinds were tried out, another that gives the same tensors in other sizes, none of them without a NaN
        or the same for every sample, is like those. A replay refuses it still where a frozen layer is not called once.
        """
        template, known = trial.template, self._latest
        is_plain = len(self.leaves) == len(self.row_leaves) and all(
            form.can_be_poisoned for form in template.forms.values()
        )
        if (
            self._num_tried < KINDS_TRIED
            or not is_plain
            or template.roots != known.roots
            or template.forms.keys() != known.forms.keys()
            or not all(_is_like(leaf, template, self._arguments.count(batch)) for leaf in self.leaves)
        ):
            self.learn(batch)
            return
        template.materialised = known.materialised
        self._remember(batch, template)

    @contextmanager
    def recording(self) -> Iterator[Trial]:
        """Watch the user's own forward pass in the block, also of another kind than those tried out."""
        trial = Trial([leaf.place for leaf in self.row_leaves])
        handles = trial.watch({root: self._probe.roots[root] for root in self._latest.roots})
        try:
            yield trial
        finally:
            for handle in handles:
                handle.remove()

    def recorded(self, trial: Trial) -> list[Tensor]:
        """Return what crossed in a recorded pass, one tensor [B, ...] for each of `row_leaves`.

        Raises:
            UncacheableError: the frozen layers did not run as they did when they were tried out.
        """
        for root in self._latest.roots:
            number = trial.calls.get(root, 0)
            require(number == 1, f"{root} was called {number} times in a forward pass, and once when it was tried out")
        for leaf in self.row_leaves:
            form, value = self._latest.forms[leaf.place], trial.value(leaf.place)
            fits = value is not None and value.dim() == len(form.shape) and value.dtype == form.dtype
            require(fits, f"{leaf.place[0]} gave something of another kind than when it was tried out")
        grad, unsettled = trial.needs_grad, trial.unsettled
        require(not grad, f"what {grad} gives needs a gradient now: something in front of it is in training")
        require(not unsettled, f"a {unsettled} is in training mode, and was in inference mode when it was tried out")
        return self._rows(trial)

    @property
    def _latest(self) -> Template:
        return next(reversed(self._templates.values()))

    def _rows(self, trial: Trial) -> list[Tensor]:
        return [_rows_first(trial.values[leaf.place], leaf) for leaf in self.row_leaves]

    def compute(self, batch: Batch, rows: Tensor | None = None) -> list[Tensor]:
        """Run the frozen layers alone, without a trace; returns a tensor [b, ...] for each of `row_leaves`.

        Args:
            batch: arguments of a call; left as they are.
            rows: numbers of the rows to compute [b], or None for all.

        Raises:
            UncacheableError: they did not run as they did when they were tried out.
        """
        with refusing():
            is_part = rows is not None and self.can_split
            own = self._arguments.take(batch, rows) if rows is not None and is_part else batch
            places = [leaf.place for leaf in self.row_leaves]
            with self._probe.session():
                trial = self._probe.outputs(own, places)
            if trial.error is not None:
                raise trial.error
            for root, _ in places:
                require(trial.calls.get(root) == 1, f"{trial.called(root)}, and once when tried out")
            found = self._rows(trial)
            return found if rows is None or is_part else [value[rows.to(value.device)] for value in found]

    def replaying(self, rows: Sequence[Tensor], batch: Batch) -> AbstractContextManager[None]:
        """Return a block in which the next forward pass of the model skips the frozen layers.

        Args:
            rows: what crosses, one tensor [B, ...] for each of `row_leaves`, on any device; copied.
            batch: arguments of that pass, of a known kind.

        Raises:
            UncacheableError: the batch is of an unknown kind, or the rows do not fit it. At the end of the block: a
                frozen layer was not called once; the pass is over then, and its output not to be trusted.
        """
        require(self.knows(batch), "a batch of this kind was never tried out")
        self._templates.move_to_end(_key(batch))
        template = self._templates[_key(batch)]
        return replaying(self.model, template, self._in_place(rows, template))

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
            wanted, found = _shape(leaf, template), tuple(stored.shape)
            require(found == wanted, f"rows for {leaf.place[0]} must have the shape {wanted}, found {found}")
            values[leaf.place] = template.forms[leaf.place].empty()
            _rows_first(values[leaf.place], leaf).copy_(stored, non_blocking=True)
        return values

    def _check(self, batch: Batch, template: Template) -> None:
        """Make sure that a whole pass with replayed outputs does what a computed one does."""
        trial = self._probe.run(batch, keeps=[leaf.place for leaf in self.row_leaves])
        outcome = check_run(trial)
        limit = tolerance(batch, next(self.model.parameters()).device)
        differing = replay_difference(self._probe, batch, template, trial.values, outcome, limit=limit)
        require(not differing, f"with the outputs of the frozen layers replayed, {differing} differs in another batch")

    def _keep_constants(self, template: Template, values: Values) -> None:
        template.keep({leaf.place: values[leaf.place] for leaf in self.leaves if leaf.axis is None})

    def _remember(self, batch: Batch, template: Template) -> None:
        self._templates[_key(batch)] = template
        while len(self._templates) > 1 and (
            len(self._templates) > MOST_SIGNATURES
            or sum(known.kept_bytes for known in self._templates.values()) > MOST_KEPT_BYTES
        ):
            self._templates.popitem(last=False)


def _check_batch(batch: Batch) -> None:
    require(not batch.needs_grad, "something in front of the model is in training, so the boundary needs a gradient")


def _key(batch: Batch) -> Hashable:
    """Return what batches of one kind have in common."""
    return signature(batch.args, batch.kwargs), batch.autocast


def _leaf(place: Place, axis: int | None, value: Tensor, lengths: Mapping[Place, int]) -> Leaf:
    shape = tuple(size for dim, size in enumerate(value.shape) if dim != axis)
    return Leaf(place=place, axis=axis, shape=shape, dtype=value.dtype, length_axis=lengths.get(place))


def _is_like(leaf: Leaf, template: Template, num_rows: int) -> bool:
    """Return whether a kind of batch has the same tensor at the place of a leaf."""
    form = template.forms.get(leaf.place)
    if form is None or form.dtype != leaf.dtype:
        return False
    return leaf.axis is None or (len(form.shape) == len(leaf.shape) + 1 and form.shape[leaf.axis] == num_rows)


def _rows_first(value: Tensor, leaf: Leaf) -> Tensor:
    return value.movedim(leaf.axis or 0, 0)


def _shape(leaf: Leaf, template: Template) -> tuple[int, ...]:
    """Return the shape of the rows [B, ...] of a leaf in one kind of batch."""
    shape, axis = template.forms[leaf.place].shape, leaf.axis or 0
    return (shape[axis], *shape[:axis], *shape[axis + 1 :])
