"""Skipping the frozen front of a model: what it hands over, recorded once and given back later
(paper §4.3).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from egeria.errors import UncacheableError
from egeria.model.batch import Batch
from egeria.model.copies import is_ours
from egeria.model.cut import LayerModule
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
from egeria.skipping.probe import PlainAttributes, Probe, Trial, difference, tolerance
from egeria.skipping.replay import Place, Template, Values, replaying
from egeria.skipping.rows import (
    RowArguments,
    check_function,
    cut_padding,
    cuttable_axes,
    find_axes,
    signature,
)

MOST_SIGNATURES = 512
"""Kinds of batches that are remembered, such as lengths to which sentences are padded."""
KINDS_TRIED = 3
"""Kinds of batches that are tried out in full before others are taken to be like them."""
MOST_CONTENTS = 8
"""Contents of the arguments that all samples share, where what is kept of a kind of batch may
depend on them."""
MOST_KEPT_BYTES = 256 * 2**20
"""Memory for what is the same for every sample, over all kinds of batches."""

Kind = tuple[Hashable, bytes]
"""How a model is called, and a digest of what samples share; empty where that does not matter."""


class Prefix:
    """The frozen front of one model, and what it hands to the rest. Made by `find`."""

    def __init__(
        self,
        probe: Probe,
        modules: Sequence[LayerModule],
        arguments: RowArguments,
        leaves: Sequence[Leaf],
        *,
        can_split: bool,
        ignores_padding: bool,
    ) -> None:
        self.model = probe.model
        self.leaves = tuple(sorted(leaves, key=lambda leaf: leaf.axis is None))
        self.row_leaves = tuple(leaf for leaf in self.leaves if leaf.axis is not None)
        self.can_split = can_split
        """Whether the frozen layers run on some rows of a batch alone."""
        self.ignores_padding = ignores_padding
        """Whether it is proven that what crosses for a sample is the same whatever length its batch
        is padded to."""
        self._probe = probe
        self._arguments = arguments
        self._templates: OrderedDict[Kind, Template] = OrderedDict()
        self._contents: dict[Hashable, set[bytes]] = {}
        self._keeps_values = False
        self._num_tried = 1
        self._modules = tuple(
            dict.fromkeys(module for root in probe.roots.values() for module in root.modules())
        )
        places = [name.rpartition(".") for module in modules for name in module.parameters]
        owners, inside = (
            [(self.model.get_submodule(place[0]), place[2]) for place in places],
            set(self._modules),
        )
        self._loose = [(owner, name) for owner, name in owners if owner not in inside]
        """Parameters of frozen layer modules that no submodule of theirs holds, such as those of
        the model itself."""
        self._attributes = PlainAttributes(self._modules)
        self._around = [module for module in self.model.modules() if _contains(module, inside)]
        """The model, and containers of frozen layers and others."""
        self._attributes_around = PlainAttributes(self._around)
        self._odd: set[Kind] = set()
        """Kinds of batches that turned out in a pass of the user's to be tried out first."""

    @classmethod
    def find(
        cls, model: nn.Module, modules: Sequence[LayerModule], batch: Batch, num_rows: int
    ) -> Prefix:
        """Find out what crosses, and prove that it can be stored by sample and given back.

        Leaves no trace in the model; takes some ten forward passes, more where more than the last
        output crosses.

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
            require(
                any(axis is not None for axis in axes.values()),
                "nothing that crosses belongs to a sample",
            )
            crossing.check_gradients()
            lengths = cuttable_axes(crossing, arguments, axes) if can_split else None
            leaves = [
                _leaf(place, axes[place], value, lengths or {})
                for place, value in crossing.values.items()
            ]
            ignores_padding = lengths is not None
            prefix = cls(
                probe,
                modules,
                arguments,
                leaves,
                can_split=can_split,
                ignores_padding=ignores_padding,
            )
            prefix._keeps_values = prefix._keeps(crossing.template)
            prefix._keep_constants(crossing.template, crossing.values)
            prefix._check(other, crossing.template)
            prefix._remember(batch, crossing.template)
            return prefix

    @property
    def shared_arguments(self) -> tuple[str, ...]:
        """Paths in `Batch.arguments` to the tensors that all samples of a batch share, however long
        these are.
        """
        return self._arguments.shared

    def weights(self) -> list[tuple[Mapping[str, Tensor | None], str]]:
        """Return where the frozen layers keep each of their parameters and buffers: a table, and
        the name in it.
        """
        tables = [
            table for module in self._modules for table in (module._parameters, module._buffers)
        ]
        inside: list[tuple[Mapping[str, Tensor | None], str]] = [
            (table, name) for table in tables for name in table
        ]
        return inside + [(owner._parameters, name) for owner, name in self._loose]

    def is_set_otherwise(self) -> bool:
        """Return whether a plain attribute of a frozen layer, such as a scale or a switch, has
        another value now.
        """
        return self._attributes.have_changed

    def is_set_otherwise_around(self) -> bool:
        """Return, once, whether a plain attribute around the frozen layers, on which they may
        depend, was set anew.
        """
        has_changed = self._attributes_around.have_changed
        if has_changed:
            self._attributes_around = PlainAttributes(self._around)
        return has_changed

    def is_hooked(self) -> bool:
        """Return whether a forward hook was put since on a frozen layer, or on a container of some.

        Replaying would leave out that of a layer, and a container's might read what stands in for
        others.
        """
        modules = (*self._modules, *(module for module in self._around if module is not self.model))
        hooks = (hook for module in modules for hook in module._forward_hooks.values())
        return any(not is_ours(hook) for hook in hooks)

    def fits(self, batch: Batch, rows: Sequence[Tensor]) -> bool:
        """Return whether rows [B, ...] have the shapes that a batch of a known kind needs."""
        template = self._templates.get(self._kind(batch))
        if template is None or len(rows) != len(self.row_leaves):
            return False
        return all(
            _shape(leaf, template) == own.shape
            for leaf, own in zip(self.row_leaves, rows, strict=True)
        )

    def knows(self, batch: Batch) -> bool:
        """Return whether a batch of this kind was tried out, so that stubs know their shapes."""
        return self._kind(batch) in self._templates

    def learn(self, batch: Batch) -> None:
        """Try out a batch of another kind: its shapes, and that replaying gives what computing
        gives (or refuse).
        """
        if self.knows(batch):
            return
        with refusing():
            _check_batch(batch)
            called, content = self._kind(batch)
            contents = self._contents.get(called, set())
            require(
                content in contents or len(contents) < MOST_CONTENTS,
                "an argument that all samples share changes from batch to batch, and what the "
                "frozen layers give for "
                "all samples alike may change with it",
            )
            num_rows = self._arguments.count(batch)
            trial = self._probe.run(batch, keeps=[leaf.place for leaf in self.leaves])
            check_run(trial)
            template, _ = stub_template(trial, self._probe)
            known = next(iter(self._templates.values()))
            for root in {*known.roots} ^ {*template.roots}:
                raise UncacheableError(
                    f"{trial.called(root)} in another kind of batch, and not so at first"
                )
            for leaf in self.leaves:
                fits = _is_like(leaf, template, num_rows)
                require(
                    fits,
                    f"{leaf.place[0]} gives something of another kind in another kind of batch",
                )
            keeps = self._keeps(template)
            require(
                self._keeps_values or not keeps,
                "the frozen layers give integers in another kind of batch alone",
            )
            template.materialised = known.materialised
            self._keep_constants(template, trial.values)
            self._check(batch, template)
            if num_rows > 1 and keeps:
                self._check(
                    self._arguments.rolled(batch), template
                )  # with what was kept of another batch
            self._remember(batch, template)
            self._num_tried += 1

    def is_to_be_tried(self, batch: Batch) -> bool:
        """Return whether a batch of this kind is to be tried out by `learn`, ahead of the user's
        pass with it.
        """
        if self.knows(batch):
            return False
        return (
            self._num_tried < KINDS_TRIED
            or not self._is_plain(self._latest)
            or self._kind(batch) in self._odd
        )

    def learn_from(self, trial: Trial, batch: Batch) -> None:
        """Learn a kind of batch from a pass of the user's with it, where it is like those that were
        tried out.

        That is one that gives the same tensors in other sizes, none of them without a NaN or the
        same for every sample. A replay refuses it still where a frozen layer is not called once.
        What is not like them is to be tried out.
        """
        template, known = trial.template, self._latest
        if (
            not self._is_plain(template)
            or template.roots != known.roots
            or template.forms.keys() != known.forms.keys()
            or not all(
                _is_like(leaf, template, self._arguments.count(batch)) for leaf in self.leaves
            )
        ):
            self._odd.add(self._kind(batch))
            return
        template.materialised = known.materialised
        self._remember(batch, template)

    def _is_plain(self, template: Template) -> bool:
        """Return whether only rows of samples cross, and only what can be NaN."""
        can_be_poisoned = all(form.can_be_poisoned for form in template.forms.values())
        return can_be_poisoned and len(self.leaves) == len(self.row_leaves)

    @contextmanager
    def recording(self) -> Iterator[Trial]:
        """Watch the user's own forward pass in the block, also of another kind than those tried
        out.
        """
        trial = Trial([leaf.place for leaf in self.row_leaves])
        handles = trial.watch(
            {root: self._probe.roots[root] for root in self._latest.roots}, guarded=True
        )
        try:
            yield trial
        finally:
            for handle in handles:
                handle.remove()

    def recorded(self, trial: Trial) -> list[Tensor]:
        """Return what crossed in a recorded pass, one tensor [B, ...] for each of `row_leaves`.

        Raises:
            UncacheableError: the frozen layers did not run as when they were tried out, or what
                crossed was not kept.
        """
        require(
            trial.error is None, f"what the frozen layers gave could not be kept ({trial.error})"
        )
        for root in self._latest.roots:
            number = trial.calls.get(root, 0)
            require(
                number == 1,
                f"{root} was called {number} times in a forward pass, and once when it was tried "
                "out",
            )
        for leaf in self.row_leaves:
            form, value = self._latest.forms[leaf.place], trial.value(leaf.place)
            fits = (
                value is not None and value.dim() == len(form.shape) and value.dtype == form.dtype
            )
            require(
                fits, f"{leaf.place[0]} gave something of another kind than when it was tried out"
            )
        grad, unsettled = trial.needs_grad, trial.unsettled
        require(
            not grad,
            f"what {grad} gives needs a gradient now: something in front of it is in training",
        )
        require(
            not unsettled,
            f"a {unsettled} is in training mode, and was in inference mode when it was tried out",
        )
        return self._rows(trial)

    @property
    def _latest(self) -> Template:
        return next(reversed(self._templates.values()))

    def _rows(self, trial: Trial) -> list[Tensor]:
        return [_rows_first(trial.values[leaf.place], leaf) for leaf in self.row_leaves]

    def compute(self, batch: Batch, rows: Tensor | None = None) -> list[Tensor]:
        """Run the frozen layers alone, without a trace; returns a tensor [b, ...] for each of
        `row_leaves`.

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
                require(
                    trial.calls.get(root) == 1, f"{trial.called(root)}, and once when tried out"
                )
            found = self._rows(trial)
            return (
                found
                if rows is None or is_part
                else [value[rows.to(value.device)] for value in found]
            )

    def replaying(self, rows: Sequence[Tensor], batch: Batch) -> AbstractContextManager[None]:
        """Return a block in which the next forward pass of the model skips the frozen layers.

        Args:
            rows: what crosses, one tensor [B, ...] for each of `row_leaves`, on any device; copied.
            batch: arguments of that pass, of a known kind.

        Raises:
            UncacheableError: the batch is of an unknown kind, or the rows do not fit it. At the end
                of the block: a frozen layer was not called once; the pass is over then, and its
                output not to be trusted.
        """
        kind = self._kind(batch)
        require(kind in self._templates, "a batch of this kind was never tried out")
        self._templates.move_to_end(kind)
        template = self._templates[kind]
        return replaying(self.model, template, self._in_place(rows, template))

    def error(
        self,
        computed: Sequence[Tensor],
        rows: Sequence[Tensor],
        lengths: Sequence[int] | None = None,
    ) -> float:
        """Return the largest difference between stored rows and what the frozen layers compute now.

        Relative to the largest value of each tensor; infinite where shapes differ or one is not
        finite.

        Args:
            computed: what crosses, one tensor [B, ...] for each of `row_leaves`.
            rows: the same from the store.
            lengths: of the samples [B], where rows have lengths: what is behind them does not
                count.
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
            require(
                found == wanted,
                f"rows for {leaf.place[0]} must have the shape {wanted}, found {found}",
            )
            values[leaf.place] = template.forms[leaf.place].empty()
            _rows_first(values[leaf.place], leaf).copy_(stored, non_blocking=True)
        return values

    def _check(self, batch: Batch, template: Template) -> None:
        """Make sure that a whole pass with replayed outputs does what a computed one does."""
        trial = self._probe.run(batch, keeps=[leaf.place for leaf in self.row_leaves])
        outcome = check_run(trial)
        limit = tolerance(batch, next(self.model.parameters()).device)
        differing = replay_difference(
            self._probe, batch, template, trial.values, outcome, limit=limit
        )
        require(
            not differing,
            f"with the outputs of the frozen layers replayed, {differing} differs in another batch",
        )

    def _keep_constants(self, template: Template, values: Values) -> None:
        template.keep({leaf.place: values[leaf.place] for leaf in self.leaves if leaf.axis is None})

    def _keeps(self, template: Template) -> bool:
        """Return whether a template gives values back that it keeps: the same for every sample, or
        integers.
        """
        rows = {leaf.place for leaf in self.row_leaves}
        has_integers = any(
            not form.can_be_poisoned for place, form in template.forms.items() if place not in rows
        )
        return has_integers or len(self.leaves) > len(self.row_leaves)

    def _kind(self, batch: Batch) -> Kind:
        """Return what batches have in common that can be replayed alike.

        That is how they are called and, where values are kept, what the arguments hold that all
        samples share.
        """
        called = signature(batch.args, batch.kwargs), batch.autocast
        return called, self._arguments.digest_of_shared(batch) if self._keeps_values else b""

    def _remember(self, batch: Batch, template: Template) -> None:
        called, content = self._kind(batch)
        self._templates[called, content] = template
        if self._keeps_values:
            self._contents.setdefault(called, set()).add(content)
        while len(self._templates) > 1 and (
            len(self._templates) > MOST_SIGNATURES
            or sum(known.kept_bytes for known in self._templates.values()) > MOST_KEPT_BYTES
        ):
            self._templates.popitem(last=False)


def _contains(module: nn.Module, inside: Collection[nn.Module]) -> bool:
    """Return whether a module that is not frozen whole has some frozen layers in it."""
    return module not in inside and any(part in inside for part in module.modules())


def _check_batch(batch: Batch) -> None:
    require(
        not batch.unreadable,
        f"the model is called with something whose contents cannot be read: {batch.unreadable}; "
        "pass tensors, numbers, "
        f"strings, tuples, lists or dictionaries",
    )
    require(
        not batch.needs_grad,
        "something in front of the model is in training, so the boundary needs a gradient",
    )


def _leaf(place: Place, axis: int | None, value: Tensor, lengths: Mapping[Place, int]) -> Leaf:
    shape = tuple(size for dim, size in enumerate(value.shape) if dim != axis)
    return Leaf(
        place=place, axis=axis, shape=shape, dtype=value.dtype, length_axis=lengths.get(place)
    )


def _is_like(leaf: Leaf, template: Template, num_rows: int) -> bool:
    """Return whether a kind of batch has the same tensor at the place of a leaf."""
    form = template.forms.get(leaf.place)
    if form is None or form.dtype != leaf.dtype:
        return False
    return leaf.axis is None or (
        len(form.shape) == len(leaf.shape) + 1 and form.shape[leaf.axis] == num_rows
    )


def _rows_first(value: Tensor, leaf: Leaf) -> Tensor:
    return value.movedim(leaf.axis or 0, 0)


def _shape(leaf: Leaf, template: Template) -> tuple[int, ...]:
    """Return the shape of the rows [B, ...] of a leaf in one kind of batch."""
    shape, axis = template.forms[leaf.place].shape, leaf.axis or 0
    return (shape[axis], *shape[:axis], *shape[axis + 1 :])
