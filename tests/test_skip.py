"""Skipping the frozen front: replaying is computing (law 3), or there is a reason why not."""

from __future__ import annotations

import copy
import io
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from egeria import tree
from egeria.errors import UncacheableError
from egeria.model.batch import Autocast, Batch
from egeria.model.cut import LayerModule
from egeria.skipping import prefix as skip
from egeria.skipping.prefix import Prefix
from egeria.skipping.rows import RowArguments, signature
from loops import outside
from menagerie import SPECIMENS, each_supported
from menagerie.oddities import Parcel, Parts
from skipping import Frozen, assert_replay_is_computing, batch_of, num_rows, unequal

REFUSED = {
    "stochastic_depth": "is random",
    "Noisy": "is random",
    "Replacing": "carries state",
    "CarryingState": "carries state|parts.0 is called 2 times",
    "Tied": "untie it, or set its requires_grad to False",
    "one_dropout": "Dropout in parts.0 is in training mode",
}
"""Specimens that cannot be skipped at any depth, and why."""


def example_of(specimen, seed=0):
    return specimen.example(torch.Generator().manual_seed(seed))


def vectors(num_rows=6, seed=0, width=8):
    return (torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)),), {}


@each_supported
def test_law_3_replaying_is_computing_or_refused_with_a_reason(specimen):
    example = example_of(specimen)
    deepest = len(Frozen(specimen.build, example).modules) - 1
    for depth in range(1, deepest + 1):
        plain, skipping = (Frozen(specimen.build, example, depth) for _ in range(2))
        if specimen.name in REFUSED:
            with pytest.raises(UncacheableError, match=REFUSED[specimen.name]):
                skipping.find()
            continue
        prefix = skipping.find()
        assert prefix.knows(batch_of(example)) and prefix.can_split
        for seed in (0, 1):
            assert_replay_is_computing(plain, skipping, prefix, example_of(specimen, seed))


def test_law_3_with_tied_weights_frozen():
    specimen = SPECIMENS["Tied"]
    plain, skipping = (Frozen(specimen.build, example_of(specimen), 2, freeze_tied=True) for _ in range(2))
    assert_replay_is_computing(plain, skipping, skipping.find(), example_of(specimen, 1))


@each_supported
def test_trying_out_leaves_no_trace(specimen):
    frozen = Frozen(specimen.build, example_of(specimen), 1)
    batch = batch_of(example_of(specimen))
    frozen.model.train()
    before, state = outside(frozen.model), copy.deepcopy(frozen.model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    try:
        prefix = Prefix.find(frozen.model, frozen.modules[:1], batch, num_rows(example_of(specimen)))
        prefix.compute(batch)
        prefix.error(prefix.compute(batch), prefix.compute(batch, torch.arange(num_rows(example_of(specimen)))))
    except UncacheableError:
        assert specimen.name in REFUSED
    assert outside(frozen.model) == before
    assert unequal(state, dict(frozen.model.state_dict())) == []
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    given, expected = (list(tree.leaves(side)) for side in ((batch.args, dict(batch.kwargs)), example_of(specimen)))
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def test_a_graph_that_waits_for_its_backward_survives_a_trial():
    frozen = Frozen(normed, vectors(), 1)
    loss = frozen.model(vectors()[0][0]).sum()
    prefix = frozen.find()
    prefix.compute(batch_of(vectors()))
    loss.backward()
    assert all(p.grad is not None for p in frozen.model.parameters() if p.requires_grad)


# What crosses


def normed():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Scattered(Parts):
    """Parts whose outputs, all but the second, are read behind the last one too."""

    def forward(self, x):
        first = self.parts[0](x)
        second = self.parts[1](first)
        third = self.parts[2](second)
        return self.head(self.parts[3](third) + first)


class Choosing(Parts):
    """A part gives an integer for each sample beside its output, and the rest looks it up."""

    def __init__(self):
        super().__init__()
        self.parts[1] = Indexing()
        self.table = nn.Embedding(4, 8)

    def forward(self, x):
        x, index, _ = self.parts[1](self.parts[0](x))
        return self.head(self.parts[3](self.parts[2](x)) + self.table(index))


class Indexing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = x + self.outer(torch.relu(self.inner(x)))
        return y, (y[:, 0] > 0).long(), y.argmax(dim=1)


class Aside(Parts):
    """The last frozen part gives two tensors, one of which nobody reads."""

    def forward(self, x):
        x = self.parts[1](self.parts[0](x))
        unused = self.parts[2](x)
        del unused
        return self.head(self.parts[3](x))


class FixedSize(Parts):
    """Runs on batches of six alone."""

    def forward(self, x):
        return super().forward(x.view(6, 8))


def layers(model, *groups):
    """Layer modules by hand: the first of each group's names is the module's."""
    return [
        LayerModule(
            name=names[0],
            submodules=tuple(names),
            parameters=tuple(f"{n}.{key}" for n in names for key, _ in model.get_submodule(n).named_parameters()),
            num_parameters=1,
            tap=names[-1],
            share=0.0,
            reason="By hand.",
        )
        for names in groups
    ]


def find(model, *names, example=None, batch=None):
    """Freeze submodules by hand, and find what they hand over."""
    for name in names:
        model.train().get_submodule(name).requires_grad_(False).eval()
    example = example or vectors()
    return Prefix.find(model, layers(model, names), batch or batch_of(example), num_rows(example))


def places(prefix):
    return [leaf.place for leaf in prefix.leaves]


def test_what_is_read_far_behind_crosses_too():
    prefix = find(Scattered(), "parts.0", "parts.1", "parts.2")
    assert places(prefix) == [("parts.0", 0), ("parts.2", 0)]


def test_integers_of_samples_cross_and_those_that_nobody_reads_do_not():
    torch.manual_seed(0)
    prefix = find(Choosing(), "parts.0", "parts.1")
    assert places(prefix) == [("parts.1", 0), ("parts.1", 1)]
    assert prefix.leaves[1].dtype == torch.int64


def test_a_last_output_that_nobody_reads_does_not_cross():
    assert places(find(Aside(), "parts.0", "parts.1", "parts.2")) == [("parts.1", 0)]


def test_a_part_called_twice_stays_and_runs_itself():
    specimen = SPECIMENS["CalledTwice"]
    frozen = Frozen(specimen.build, example_of(specimen), 2)
    prefix = frozen.find()
    calls = []
    for index in (0, 1):
        part = frozen.model.parts[index].inner
        part.register_forward_hook(lambda *_, index=index: calls.append(index))
    with prefix.replaying(prefix.compute(batch_of(example_of(specimen))), batch_of(example_of(specimen))):
        frozen.model(*example_of(specimen)[0])
    assert calls == [1, 1]


def test_models_of_one_batch_size_run_whole():
    model = FixedSize()
    prefix = find(model, "parts.0", "parts.1")
    assert not prefix.can_split and prefix.leaves[0].axis == 0
    whole, part = prefix.compute(batch_of(vectors())), prefix.compute(batch_of(vectors()), torch.tensor([4, 1]))
    assert torch.equal(part[0], whole[0][[4, 1]])


# Recording, computing, replaying


def test_recorded_and_replayed_rows_are_copies():
    specimen = SPECIMENS["InPlace"]
    frozen = Frozen(specimen.build, example_of(specimen), 1)
    prefix = frozen.find()
    with prefix.recording() as recording:
        frozen.model(*example_of(specimen)[0])
    (rows,) = prefix.recorded(recording)
    assert rows.min() < 0, "the relu behind must not have come here"
    kept = rows.clone()
    with prefix.replaying([rows], batch_of(example_of(specimen))):
        frozen.model(*example_of(specimen)[0])
    assert torch.equal(kept, rows)


def test_strides_come_back_whatever_the_layout_of_the_rows():
    specimen = SPECIMENS["channels_last"]
    frozen = Frozen(specimen.build, example_of(specimen), 1)
    prefix = frozen.find()
    strides = []
    frozen.model.blocks[1].register_forward_pre_hook(lambda _, args: strides.append(args[0].stride()))
    frozen.model(*example_of(specimen)[0])
    rows = [row.contiguous() for row in prefix.compute(batch_of(example_of(specimen)))]
    with prefix.replaying(rows, batch_of(example_of(specimen))):
        frozen.model(*example_of(specimen)[0])
    assert strides[0] == strides[1] != rows[0].stride()


def test_computing_ends_behind_the_boundary_and_leaves_the_arguments():
    specimen = SPECIMENS["OverwritingItsInput"]
    frozen = Frozen(specimen.build, example_of(specimen), 2)
    prefix = frozen.find()
    ran = []
    for part in frozen.model.parts:
        part.register_forward_pre_hook(lambda *_: ran.append(1))
    batch = batch_of(example_of(specimen))
    prefix.compute(batch, torch.tensor([1, 3]))
    assert len(ran) == 2 and torch.equal(batch.args[0], example_of(specimen)[0][0])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_stubs_and_hooks_are_gone_whatever_happens(error):
    frozen = Frozen(normed, vectors(), 1)
    prefix = frozen.find()
    rows = prefix.compute(batch_of(vectors()))
    before = outside(frozen.model)
    with pytest.raises(error), prefix.replaying(rows, batch_of(vectors())):
        assert outside(frozen.model) != before
        raise error
    with pytest.raises(error), prefix.recording():
        raise error
    assert outside(frozen.model) == before
    twin = copy.deepcopy(frozen.model)
    torch.save(frozen.model, io.BytesIO())
    twin[0].weight.data.zero_()
    assert not torch.equal(twin[0](vectors()[0][0]), frozen.model[0](vectors()[0][0]))


def test_a_forward_of_the_users_own_comes_back():
    model = normed()
    own = model[0].forward
    model[0].forward = own
    prefix = find(model, "0", "1")
    with prefix.replaying(prefix.compute(batch_of(vectors())), batch_of(vectors())):
        model(*vectors()[0])
    assert vars(model[0])["forward"] is own


def test_a_layer_that_ran_another_number_of_times_is_noticed():
    frozen = Frozen(normed, vectors(), 1)
    prefix = frozen.find()
    rows = prefix.compute(batch_of(vectors()))
    with pytest.raises(UncacheableError, match="called 0 times"), prefix.replaying(rows, batch_of(vectors())):
        pass
    with prefix.recording() as recording:
        frozen.model(*vectors()[0])
        frozen.model(*vectors()[0])
    with pytest.raises(UncacheableError, match="called 2 times"):
        prefix.recorded(recording)


def test_a_mode_or_gradient_that_came_back_is_noticed():
    class Tail(nn.Sequential):
        pass

    model = Tail(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    prefix = find(model, "0", "1")
    model.train()
    with prefix.recording() as recording:
        model(*vectors()[0])
    with pytest.raises(UncacheableError, match="training mode"):
        prefix.recorded(recording)
    model.eval().requires_grad_(True)
    with prefix.recording() as recording:
        model(*vectors()[0])
    with pytest.raises(UncacheableError, match="gradient"):
        prefix.recorded(recording)


def test_wrong_rows_and_unknown_batches_are_refused():
    prefix = find(normed(), "0", "1")
    with pytest.raises(UncacheableError, match="never tried out"):
        prefix.replaying([], batch_of(vectors(4)))
    with pytest.raises(UncacheableError, match=r"shape \(6, 8\)"):
        prefix.replaying([torch.zeros(5, 8)], batch_of(vectors()))
    assert prefix.fits(batch_of(vectors()), [torch.zeros(6, 8)])
    assert not prefix.fits(batch_of(vectors()), [torch.zeros(6, 9)])
    assert not prefix.fits(batch_of(vectors(4)), [torch.zeros(4, 8)])


def test_the_error_of_rows_is_relative_to_the_largest_value():
    prefix = find(normed(), "0", "1")
    (rows,) = prefix.compute(batch_of(vectors()))
    assert prefix.error(prefix.compute(batch_of(vectors())), [rows]) == 0
    wrong = rows.clone()
    wrong[2, 3] += 0.1 * rows.abs().max()
    assert prefix.error(prefix.compute(batch_of(vectors())), [wrong]) == pytest.approx(0.1, rel=1e-3)
    wrong[0, 0] = torch.nan
    assert prefix.error(prefix.compute(batch_of(vectors())), [wrong]) == float("inf")
    assert prefix.error(prefix.compute(batch_of(vectors())), [rows[:3]]) == float("inf")


def test_other_batches_are_learnt_and_not_too_many_remembered(monkeypatch):
    plain, skipping = (Frozen(normed, vectors(), 1) for _ in range(2))
    prefix = skipping.find()
    prefix.learn(batch_of(vectors(4)))
    assert_replay_is_computing(plain, skipping, prefix, vectors(4, seed=1))
    monkeypatch.setattr(skip, "MOST_SIGNATURES", 2)
    prefix.learn(batch_of(vectors(5)))
    assert [prefix.knows(batch_of(vectors(number))) for number in (6, 4, 5)] == [False, True, True]


class Biased(Parts):
    """A frozen part makes of a context, the same for all samples, what is added to each; another counts in it."""

    def __init__(self):
        super().__init__()
        self.parts[1] = Counting()
        self.table = nn.Embedding(9, 8)

    def forward(self, x, context):
        bias, number = self.parts[1](context)
        return self.head(self.parts[3](self.parts[2](self.parts[0](x) + bias) + self.table(number)))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, context):
        return self.inner(context), (context > 0).sum()


class CountingAlone(Biased):
    """Nothing crosses that is the same for all samples but an integer."""

    def forward(self, x, context):
        _, number = self.parts[1](context)
        return self.head(self.parts[3](self.parts[2](self.parts[0](x)) + self.table(number)))


def replayed(prefix, arguments):
    """Return what the model gives with its frozen layers skipped, learnt first where that is needed."""
    if not prefix.knows(batch_of(arguments)):
        prefix.learn(batch_of(arguments))
    with prefix.replaying(prefix.compute(batch_of(arguments)), batch_of(arguments)):
        return prefix.model(*arguments[0])


def in_context(number):
    """Six samples and a context with so many positive numbers."""
    return (*vectors()[0], torch.arange(8.0) - 7.5 + number), {}


@pytest.mark.parametrize("build", [Biased, CountingAlone])
def test_what_is_kept_for_all_samples_goes_with_what_they_share(build):
    prefix = find(build(), "parts.0", "parts.1", example=in_context(1))
    for number in (1, 2, 5, 2, 1):
        expected = prefix.model(*in_context(number)[0])
        assert torch.allclose(replayed(prefix, in_context(number)), expected), number
    for number in (0, 3, 4, 6, 7):
        replayed(prefix, in_context(number))
    with pytest.raises(UncacheableError, match="all samples share changes from batch to batch"):
        replayed(prefix, in_context(8))
    with pytest.raises(UncacheableError, match="all samples share changes from batch to batch"):
        replayed(prefix, in_context(8.25))


def test_what_samples_share_is_not_looked_at_where_nothing_is_kept():
    class Conditioned(Parts):
        def forward(self, x, context):
            return super().forward(x + context)

    prefix = find(Conditioned(), "parts.0", "parts.1", example=in_context(1))
    for number in range(20):
        assert prefix.knows(batch_of(in_context(number / 3)))


def test_integers_in_another_kind_of_batch_alone_are_refused():
    class Late(Parts):
        """Counts in batches of four."""

        def __init__(self):
            super().__init__()
            self.parts[1] = LateCounting()

        def forward(self, x):
            x, number = self.parts[1](self.parts[0](x))
            return self.head(self.parts[3](self.parts[2](x))) + (0 if number is None else number)

    prefix = find(Late(), "parts.0", "parts.1")
    with pytest.raises(UncacheableError, match="integers in another kind of batch"):
        prefix.learn(batch_of(vectors(4)))


class LateCounting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x), (x > 0).sum() if len(x) == 4 else None


def test_mixed_precision_is_recorded_as_it_is():
    model = normed()
    args, kwargs = vectors()
    with torch.autocast("cpu", torch.bfloat16):
        batch = Batch.of_call(args, kwargs, "cpu")
    prefix = find(model, "0", "1", batch=batch)
    assert prefix.leaves[0].dtype == torch.bfloat16
    plain = Batch(args=args, kwargs=kwargs, autocast=Autocast(device_type="cpu", enabled=False, dtype=torch.bfloat16))
    assert prefix.knows(batch) and not prefix.knows(plain)
    rows = prefix.compute(batch)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        computed = model(*args)
        with prefix.replaying(rows, batch):
            assert torch.equal(model(*args), computed)


# Refusals


class Between(Parts):
    """Does something between its second and its third part."""

    def __init__(self, between):
        super().__init__()
        self.between = between

    def forward(self, x):
        x = self.parts[1](self.parts[0](x))
        return self.head(self.parts[3](self.parts[2](self.between(self, x))))


class Rare(Parts):
    """Leaves out its second part one time in twenty."""

    def forward(self, x):
        for index, part in enumerate(self.parts):
            if not (index == 1 and self.training and torch.rand(()) < 0.05):
                x = part(x)
        return self.head(x)


class Telling(Parts):
    """Its first part leaves a note that the model adds to its output."""

    def __init__(self):
        super().__init__()
        self.parts[0] = Noting()

    def forward(self, x):
        return super().forward(x) + self.parts[0].note


class Noting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.note = nn.Linear(8, 8), nn.Linear(8, 8), None

    def forward(self, x):
        y = self.outer(torch.relu(self.inner(x)))
        self.note = y.detach().mean()
        return x + y


class Writing(nn.Module):
    """Counts in a buffer, in inference too."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class Packing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return Parcel(self.inner(x))


class Unpacking(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, parcel):
        return self.inner(parcel.content)


class Appending(Parts):
    """Its second part writes into a list that it is given, as key-value caches are."""

    def __init__(self):
        super().__init__()
        self.parts[1] = Filling()

    def forward(self, x):
        notes = []
        x = self.parts[1](self.parts[0](x), notes)
        return self.head(self.parts[3](self.parts[2](x))), notes


class Filling(Noting):
    def forward(self, x, notes):
        notes.append(self.inner(x))
        return self.outer(notes[0])


class Straddling(Parts):
    """Recomputes two parts in one section in the backward pass."""

    def forward(self, x):
        x = self.parts[0](x)
        x = checkpoint(lambda y: self.parts[2](self.parts[1](y)), x, use_reentrant=False)
        return self.head(self.parts[3](x))


class Looping(Parts):
    """Runs its second part twice and reads both results."""

    def forward(self, x):
        first = self.parts[1](x)
        second = self.parts[1](first)
        return self.head(self.parts[3](self.parts[2](first + second)))


class Whispering(Parts):
    """Its first part tells the second, which runs twice, something beside its output."""

    def __init__(self):
        super().__init__()
        self.parts[0], self.parts[1] = Filling(), Listening()

    def forward(self, x):
        notes = []
        x = self.parts[0](x, notes)
        x = self.parts[1](self.parts[1](x, notes), notes)
        return self.head(self.parts[3](self.parts[2](x)))


class Listening(Noting):
    def forward(self, x, notes):
        return self.inner(x) + (notes[0] if notes else 0)


def noised(model, x):
    return x + 0.1 * torch.randn_like(x)


def dropped(model, x):
    return functional.dropout(x, 0.1, training=model.training)


def mixed(model, x):
    return x + x.mean(dim=0)


def centred(model, x):
    return x - x.mean()


def pooled(model, x):
    return x.mean(dim=0, keepdim=True)


def three(model, kind=nn.Dropout):
    return nn.Sequential(nn.Linear(8, 8), model, nn.Linear(8, 3))


REASONS = [
    (lambda: Between(noised), ["parts.0", "parts.1", "parts.2"], "is random"),
    (lambda: Between(dropped), ["parts.0", "parts.1", "parts.2"], "functional dropout"),
    (lambda: Between(mixed), ["parts.0", "parts.1", "parts.2"], "depends on the other samples"),
    (lambda: Between(centred), ["parts.0", "parts.1", "parts.2"], "depends on the other samples"),
    (lambda: Between(pooled), ["parts.0", "parts.1", "parts.2"], "no axis with one row per sample"),
    (Rare, ["parts.0", "parts.1"], "is random"),
    (Telling, ["parts.0", "parts.1"], "set parts.0.note in every forward pass"),
    (lambda: three(Writing()), ["0", "1"], "set 1.calls in every forward pass"),
    (Appending, ["parts.0", "parts.1"], "do more than return their outputs.*output.1"),
    (lambda: nn.Sequential(nn.Linear(8, 8), Packing(), Unpacking()), ["0", "1"], "object of its own"),
    (Straddling, ["parts.0", "parts.1"], "backward pass runs parts.1 again"),
    (Looping, ["parts.1"], "nothing to skip: parts.1 is called 2 times"),
    (Whispering, ["parts.0", "parts.1"], "parts.1 is called 2 times in a forward pass, and"),
    (lambda: torch.compile(Parts(), backend="eager"), ["_orig_mod.parts.0"], "is compiled"),
]


def test_what_cannot_be_skipped_is_refused_with_a_reason():
    for build, names, reason in REASONS:
        torch.manual_seed(0)
        with pytest.raises(UncacheableError, match=reason):
            find(build(), *names)


class Topping(Parts):
    """A part gives the largest value of the whole batch beside its output."""

    def __init__(self):
        super().__init__()
        self.parts[1] = Largest()

    def forward(self, x):
        x, largest = self.parts[1](self.parts[0](x))
        return self.head(self.parts[3](self.parts[2](x)) + largest)


class Largest(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x), x.amax().reshape(1)


def test_a_statistic_of_the_batch_is_no_constant_wherever_in_it_the_value_stands():
    """Half of the rows have the same largest value as all of them, the other half has not."""
    for row in range(6):
        torch.manual_seed(0)
        model, (images,) = Topping(), vectors()[0]
        model.parts[0] = nn.Hardtanh(-1e3, 1e3)
        images[row] = 100.0
        with pytest.raises(UncacheableError, match=r"which samples a batch has|no axis with one row per sample"):
            find(model, "parts.0", "parts.1", example=((images,), {}))


@pytest.mark.parametrize("module", [nn.Dropout(0.5), nn.BatchNorm1d(8)], ids=["Dropout", "BatchNorm1d"])
def test_training_mode_in_the_front_is_refused(module):
    model = three(module)
    model[:2].requires_grad_(False)
    with pytest.raises(UncacheableError, match=f"{type(module).__name__} in 1 is in training mode"):
        Prefix.find(model, layers(model, ["0", "1"]), batch_of(vectors()), 6)


def test_a_boundary_that_needs_a_gradient_is_refused():
    model = normed()
    with pytest.raises(UncacheableError, match=r"0\.weight is in training still"):
        Prefix.find(model, layers(model, ["0", "1"]), batch_of(vectors()), 6)

    class Prompted(Parts):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(8))

        def forward(self, x):
            return super().forward(x + self.prompt)

    with pytest.raises(UncacheableError, match=r"parts\.0 gives needs a gradient"):
        find(Prompted(), "parts.0", "parts.1")
    batch = Batch.of_call((vectors()[0][0].requires_grad_(),), {}, "cpu")
    with pytest.raises(UncacheableError, match="in front of the model is in training"):
        find(normed(), "0", "1", batch=batch)


def test_hooks_of_the_users_on_frozen_layers_and_around_are_refused_and_others_are_not():
    for name in ["0", "0.0", "0.0.0", "1", ""]:
        model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)), nn.Linear(8, 3))
        model.get_submodule(name).register_forward_hook(lambda *_: None)
        if name.startswith("0"):
            with pytest.raises(UncacheableError, match=f"forward hook on {name}"):
                find(model, "0.0")
        else:
            assert places(find(model, "0.0")) == [("0.0", 0)]


def test_a_model_that_fails_and_one_that_gives_nan_are_refused():
    def broken(model, x):
        raise RuntimeError("broken on purpose")

    with pytest.raises(UncacheableError, match="broken on purpose"):
        find(Between(broken), "parts.0")
    with pytest.raises(UncacheableError, match="NaN"):
        find(Between(lambda model, x: x * torch.nan), "parts.0")


def test_batches_that_do_not_tell_their_samples_are_refused():
    with pytest.raises(UncacheableError, match="one sample"):
        find(normed(), "0", "1", example=vectors(1))
    with pytest.raises(UncacheableError, match="one row for each of the 9 samples"):
        model = normed().requires_grad_(False)
        Prefix.find(model, layers(model, ["0", "1"]), batch_of(vectors()), 9)
    parcel = Batch.of_call((vectors()[0][0], Parcel(vectors()[0][0])), {}, "cpu")
    with pytest.raises(UncacheableError, match="object with tensors inside"):
        RowArguments.find(parcel, 6)


@pytest.mark.parametrize("thing", [np.ones(8), {1.0}, object(), torch.Generator(), torch.eye(8).to_sparse()])
def test_what_cannot_be_looked_into_is_refused(thing):
    class Given(Parts):
        def forward(self, x, thing):
            return super().forward(x)

    batch = Batch.of_call((*vectors()[0], thing), {}, "cpu")
    with pytest.raises(UncacheableError, match=r"cannot be read: args\.1 \((ndarray|set|object|Generator|Tensor)\)"):
        find(Given(), "parts.0", "parts.1", batch=batch)
    prefix = find(Given(), "parts.0", "parts.1", batch=Batch.of_call((*vectors()[0], np.float32(1)), {}, "cpu"))
    with pytest.raises(UncacheableError, match="cannot be read"):
        prefix.learn(batch)


def test_nothing_that_crosses_is_refused():
    class Deaf(Parts):
        def forward(self, x):
            self.parts[0](x)
            return self.head(self.parts[3](self.parts[2](self.parts[1](x))))

    with pytest.raises(UncacheableError, match="no tensor that the frozen layers give is read"):
        find(Deaf(), "parts.0")


def test_a_batch_that_runs_another_way_is_refused_when_it_is_learnt():
    def two_ways(model, x):
        return model.parts[0](x) if len(x) == 4 else x

    prefix = find(Between(two_ways), "parts.0", "parts.1")
    with pytest.raises(UncacheableError, match=r"parts\.0 is called 2 times"):
        prefix.learn(batch_of(vectors(4)))
    assert not prefix.knows(batch_of(vectors(4)))


# Arguments


def test_signatures_are_equal_for_calls_that_run_alike():
    (x,), _ = vectors()
    same = signature((x,), {"a": [x, 1], "b": None})
    assert same == signature((torch.zeros(6, 8),), {"b": None, "a": [x + 1, 1]})
    others = [
        signature((x[:4],), {"a": [x, 1], "b": None}),
        signature((x.double(),), {"a": [x, 1], "b": None}),
        signature((x,), {"a": [x, 2], "b": None}),
        signature((x,), {"a": [x, True], "b": None}),
        signature((x,), {"a": (x, 1), "b": None}),
        signature((x.clone().requires_grad_(),), {"a": [x, 1], "b": None}),
    ]
    assert same not in others
    assert hash(same)


def test_signatures_hold_the_plain_values_in_objects():
    first, same, other = (SimpleNamespace(scale=scale, mask=torch.ones(2)) for scale in (1.0, 1.0, 2.0))
    assert signature((first,), {}) == signature((same,), {}) != signature((other,), {})
    assert signature((slice(2),), {}) != signature((slice(3),), {})


def test_tensors_shared_by_the_batch_stay_whole_also_where_they_are_as_long():
    words, mask = torch.arange(30).view(6, 5), torch.ones(5, 5).tril()
    rows = RowArguments.find(batch_of(((words,), {"mask": mask})), 6)
    other = batch_of(((words[:5],), {"mask": mask}))
    part = rows.take(other, torch.tensor([4, 0]))
    assert torch.equal(part.args[0], words[[4, 0]]) and torch.equal(part.kwargs["mask"], mask)
