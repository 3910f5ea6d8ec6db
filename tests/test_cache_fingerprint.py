"""Fingerprints of the input, and true lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from egeria.cache.fingerprint import agree, fingerprints
from egeria.cache.layout import BatchKeys
from egeria.cache.samples import BatchIndices
from egeria.model.batch import Batch
from egeria.skipping.rows import true_lengths


def prints(*args, rows=None, **kwargs):
    first = args[0] if args else next(iter(kwargs.values()))
    return fingerprints(args, kwargs, len(first) if rows is None else rows)


def images(count=16, shape=(3, 32, 32), seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool]


def of_type(dtype, count=16, shape=(3, 8, 8)):
    generator = torch.Generator().manual_seed(1)
    if dtype.is_floating_point:
        return torch.randn(count, *shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 200, (count, *shape), generator=generator).to(dtype)


def test_shape_and_type():
    found = prints(images())
    assert found.shape == (16, 2) and found.dtype == np.float32
    assert np.array_equal(found, np.floor(found)) and found.max() < 2**24


def test_a_row_agrees_whatever_it_lies_beside():
    for dtype in DTYPES:
        for shape in [(3, 8, 8), (3, 7, 5), (37,), (1000, 131)]:
            batch = of_type(dtype, shape=shape)
            whole = prints(batch)
            order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
            assert agree(prints(batch[order]), whole[order.numpy()]).all()
            for count in (1, 3, 15):
                assert agree(prints(batch[:count]), whole[:count]).all()
                assert agree(prints(batch[5 : 5 + count].clone()), whole[5 : 5 + count]).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_strides_and_threads_do_not_count(threads):
    batch = images(32, (5, 65, 64))
    expected = prints(batch)
    torch.set_num_threads(threads)
    assert agree(prints(batch.to(memory_format=torch.channels_last)), expected).all()
    assert agree(prints(batch.transpose(1, 3).contiguous().transpose(1, 3)), expected).all()
    assert agree(prints(torch.stack([batch, batch], 1)[:, 0]), expected).all()
    one = batch[:1].to(memory_format=torch.channels_last)
    assert agree(prints(one), expected[:1]).all()


def test_every_pixel_counts():
    image = (torch.randint(0, 256, (3, 32, 32), generator=torch.Generator().manual_seed(3)).float() / 255 - 0.45) / 0.25
    changed = image.flatten().repeat(3072, 1) + torch.eye(3072) / 255
    found = prints(torch.cat([image.flatten()[None], changed]))
    assert not agree(found[1:], found[:1]).any()


def test_every_token_counts():
    tokens = torch.randint(0, 30000, (384,), generator=torch.Generator().manual_seed(4))
    changed = tokens.repeat(384, 1) + torch.eye(384, dtype=torch.int64)
    found = prints(torch.cat([tokens[None], changed]))
    assert not agree(found[1:], found[:1]).any()


def test_places_count_also_among_values_of_one_mantissa():
    for values in [(1.0, -1.0), (1.0, 2.0), (0.0, 1.0), (4.0, -0.5), (1, 2), (0, 1), (-1, 1)]:
        generator = torch.Generator().manual_seed(5)
        chosen = torch.tensor(values)[torch.randint(0, 2, (64,), generator=generator)]
        shuffled = torch.stack([chosen[torch.randperm(64, generator=generator)] for _ in range(500)])
        rows = torch.unique(torch.cat([chosen[None], shuffled]), dim=0)
        assert len(np.unique(prints(rows), axis=0)) == len(rows)


def test_small_features_count_beside_large_ones():
    rows = torch.zeros(100, 20)
    rows[:, 0] = 1e6
    rows[:, 7] = torch.arange(100) / 10
    assert len(np.unique(prints(rows), axis=0)) == 100


def test_random_rows_do_not_agree():
    rows = torch.randn(200_000, 8, generator=torch.Generator().manual_seed(6))
    assert len(np.unique(prints(rows), axis=0)) == 200_000


def test_all_tensors_count_each_in_its_place():
    first, second = images(seed=1), images(seed=2)
    mine = prints(first, second)
    assert not agree(mine, prints(second, first)).any()
    assert not agree(mine, prints(first)).any()
    assert not agree(prints(first, x=second), prints(first, x=second + 1)).any()
    assert agree(prints(x=first, y=second), prints(y=second, x=first)).all()
    assert agree(prints({"a": [first, (second,)]}, rows=16), mine).all()


def test_tensors_without_rows_count_for_every_row():
    batch = images()
    assert not agree(prints(batch, torch.tensor(1.0)), prints(batch, torch.tensor(2.0))).any()


def test_without_a_tensor_of_rows_nothing_agrees():
    for found in (prints(torch.zeros(7, 4), rows=3), prints("text", rows=3), prints(torch.zeros(3, 3).to_sparse())):
        assert found.shape == (3, 2)
        assert not agree(found, found).any()


def test_padding_does_not_count():
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(5, 1000, (4, 20), generator=generator)
    mask = (torch.arange(20) < torch.tensor([[3], [9], [20], [12]])).long()
    labels = tokens.masked_fill(mask == 0, -100)

    def padded(length, filler):
        more = length - 20
        return fingerprints(
            (),
            {
                "input_ids": torch.nn.functional.pad(tokens.masked_fill(mask == 0, filler), (0, more), value=filler),
                "attention_mask": torch.nn.functional.pad(mask, (0, more)),
                "labels": torch.nn.functional.pad(labels, (0, more), value=-100),
            },
            4,
        )

    expected = padded(20, 0)
    assert agree(padded(20, 1), expected).all() and agree(padded(31, 1), expected).all()
    mask[1, 8] = 0
    assert agree(padded(20, 0), expected).tolist() == [True, False, True, True]


def test_gradients_and_autocast_change_nothing():
    batch = images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert agree(prints(batch.clone().requires_grad_()), prints(batch)).all()
    with torch.inference_mode():
        assert agree(prints(batch.clone()), prints(images())).all()


def test_with_what_cannot_be_looked_into_nothing_agrees():
    for thing in [np.ones(3), {1}, object(), torch.Generator()]:
        found = prints(images(3), thing=thing)
        assert not agree(found, found).any()


def known_by(ignores_padding=False, **kwargs):
    """Return the fingerprints by which the store knows the samples of a call."""
    batch = Batch.of_call((), kwargs, "cpu")
    count = len(next(iter(kwargs.values())))
    indices = BatchIndices(number=0, samples=np.arange(count))
    keys = BatchKeys.of(batch, indices, has_length=False, ignores_padding=ignores_padding)
    return keys.prints


def test_in_the_store_it_counts_how_the_model_is_called():
    words = torch.randint(1, 50, (4, 6), generator=torch.Generator().manual_seed(8))
    expected = known_by(x=words, scale=1.0)
    assert agree(known_by(x=words, scale=1.0, num_items_in_batch=7), expected).all()
    assert agree(known_by(x=words[:3], scale=1.0), expected[:3]).all()
    others = [
        known_by(x=words, scale=2.0),
        known_by(x=words, scale=1),
        known_by(x=words, scale="1.0"),
        known_by(x=words),
        known_by(x=words.int(), scale=1.0),
        known_by(x=torch.nn.functional.pad(words, (0, 2)), scale=1.0),
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        others.append(known_by(x=words, scale=1.0))
    for other in others:
        assert not agree(other, expected).any()
        assert other.max() < 2**24 and np.array_equal(other, np.floor(other))
    ignoring = known_by(True, x=words, scale=1.0)
    assert agree(known_by(True, x=torch.nn.functional.pad(words, (0, 2)), scale=1.0), ignoring).all()
    assert not agree(known_by(True, x=words, scale=2.0), ignoring).any()


def test_empty_batches_and_rows():
    assert prints(torch.zeros(0, 3)).shape == (0, 2)
    assert agree(prints(torch.zeros(4, 0)), prints(torch.zeros(4, 0))).all()


def test_true_lengths():
    for dtype in [torch.int64, torch.bool, torch.int32]:
        mask = (torch.arange(6) < torch.tensor([[1], [6], [4]])).to(dtype)
        found = true_lengths({"attention_mask": mask}, 3)
        assert found.dtype == np.int64 and found.tolist() == [1, 6, 4]


def test_no_true_lengths_but_of_a_right_padded_mask():
    for mask in [
        None,
        torch.tensor([[0, 1, 1], [1, 1, 1]]),
        torch.tensor([[1, 0, 1], [1, 1, 1]]),
        torch.tensor([[2, 1, 0], [1, 1, 1]]),
        torch.tensor([[0, 0, 0], [1, 1, 1]]),
        torch.ones(2, 3),
        torch.ones(2, 1, 3, dtype=torch.int64),
        torch.ones(3, 3, dtype=torch.int64),
        [[1, 1], [1, 0]],
    ]:
        assert true_lengths({"attention_mask": mask}, 2) is None
        assert true_lengths({}, 2) is None
