"""Nested tensors: what comes out is what went in, but for the tensors."""

from types import SimpleNamespace

import numpy as np
import torch

from egeria import tree
from egeria.model.passes import Batch


def test_the_first_activation_is_of_floating_point_and_has_samples_and_features():
    hidden, later = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3)
    value = (torch.ones(2, 3, dtype=torch.long), torch.ones(2), torch.tensor(1.0), {"h": hidden, "l": later})
    assert tree.first_activation(value) is hidden
    assert tree.first_activation((torch.ones(2), None, "text")) is None


def test_rows_are_taken_of_every_tensor_that_travels_with_the_batch():
    value = (torch.arange(12).reshape(6, 2), {"mask": torch.arange(6), "flag": True})
    cut = tree.take_rows(value, 4)
    assert cut[0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cut[1]["mask"].tolist() == [0, 1, 2, 3] and cut[1]["flag"] is True


def test_a_batch_is_cut_beside_what_its_loss_is_divided_by():
    """`Trainer` hands that to the model as a scalar."""
    kwargs = {"ids": torch.arange(12).reshape(6, 2), "num_items_in_batch": torch.tensor(12)}
    cut = Batch.of_call((), kwargs, "cpu").first_rows(4)
    assert cut.kwargs["ids"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]] and cut.kwargs["num_items_in_batch"] == 12
    assert Batch.of_call((), {**kwargs, "scale": torch.tensor(2.0)}, "cpu").first_rows(4).kwargs["ids"].shape == (6, 2)


def test_a_tree_that_cannot_be_cut_safely_stays_whole():
    for value in [
        (torch.ones(6, 2), torch.ones(5, 5)),
        (torch.ones(6, 2), torch.tensor(0.5)),
        torch.tensor(0.5),
        (torch.ones(3, 2), torch.ones(3)),
        (torch.ones(4, 2), torch.ones(4)),
        ("text", None),
    ]:
        assert tree.take_rows(value, 4) is value


def test_what_cannot_be_looked_into_is_named():
    for value in [
        np.ones(2),
        {1},
        frozenset(),
        bytearray(2),
        object(),
        torch.Generator(),
        iter([1]),
        slice(np.ones(2)),
    ]:
        found = tree.unreadable({"a": [1, SimpleNamespace(b=value)]}, "kwargs")
        assert found == f"kwargs.a.1.b ({type(value).__name__})"
