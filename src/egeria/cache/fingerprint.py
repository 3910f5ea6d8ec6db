"""Fingerprints of the model's input: the last guard against an activation of another sample.

Exact, on purpose. Each element is multiplied by a fixed random number between 1 and 2, which
spreads it over all bits of a float; the *bits* of the products are then added up as integers. The
product is rounded the same everywhere and integers add up the same in any order, so a row's value
depends on its elements alone: not on the rest of the batch, strides, threads or padding. And there
is no tolerance for a small change to hide in, as there is with a projection: among 10^6 pairs of
rows each that differ in one pixel by 1/255, one token, two elements swapped, signs shuffled, or
0.01 to 0.1 in one feature beside one of 10^6 (float32 sums lose that), none agreed. Limits: of
changes in the last bit of one float32 a tenth agrees; rows of float32 that differ in nothing but
signs agree once in 2^24, others once in 2^32 or less.

The price: input that comes out with other last bits in another epoch (features that a matrix
product made of the whole batch) mostly does not agree, so it is not served from the cache. Measured
on one core: 0.3 ms for 128 x 3 x 32 x 32 floats (a matrix product with two float32 columns takes
0.45 ms), 3 ms for 32 x 3 x 224 x 224, 0.2 ms for 32 x 384 tokens with their mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria import tree
from egeria.model.batch import OF_THE_LOSS, Batch

SEED = 20
SALT_SEED = 21
PART_ELEMENTS = (
    2**17
)  # made at a time: half a megabyte stays in the processor's cache, and the allocator keeps it
IGNORED_LABEL = -100  # what the loss skips, hence what labels are padded with
MANTISSA_BITS = {torch.int32: 23, torch.int64: 52}  # of the float type of that size
MASKS = ("attention_mask", "decoder_attention_mask")


def fingerprints(args: tuple[Any, ...], kwargs: Mapping[str, Any], num_rows: int) -> np.ndarray:
    """Return one fingerprint for each row of the model's input, as float32 [B, 2] of whole numbers.

    Tensors whose first axis has `num_rows` entries count row by row, all others count for every
    row. Padding does not: trailing zeros add nothing, two-dimensional integers are multiplied by
    the attention mask of their shape, and -100 in labels is read as 0. Nor does
    `num_items_in_batch`. On an accelerator this waits for it.

    Args:
        args: positional arguments of the model.
        kwargs: its keyword arguments.
        num_rows: the number of samples B.

    Returns:
        The fingerprints; NaN, which agrees with nothing, where no tensor has a row for each sample
        or something is of a kind whose contents cannot be read (sparse, quantized, an array of
        numpy).
    """
    hashes = row_hashes(args, kwargs, num_rows)
    if hashes is None:
        return np.full((num_rows, 2), np.nan, dtype=np.float32)
    return _folded(hashes.cpu().numpy())


@torch.no_grad()
def row_hashes(args: tuple[Any, ...], kwargs: Mapping[str, Any], num_rows: int) -> Tensor | None:
    """Return what `fingerprints` are made of, on the device of the input, without waiting for it:
    int64 [B].

    None where no tensor has a row for each sample, or something is of a kind whose contents cannot
    be read.
    """
    if tree.unreadable((args, kwargs)):
        return None
    total: Tensor | None = None
    found_rows = False
    for index, (name, tensor) in enumerate(_named_tensors(args, kwargs)):
        of_rows = tensor.dim() > 0 and tensor.shape[0] == num_rows
        found_rows |= of_rows
        values = _without_padding(name, tensor.detach(), kwargs)
        sums = _hashes(values if of_rows else values.reshape(1, -1), index)
        total = sums if total is None else total + sums.to(total.device)
    return total.expand(num_rows) if total is not None and found_rows else None


def describe(batch: Batch, num_rows: int, *, shapes: bool, shared: Collection[str] = ()) -> str:
    """Return all that counts of a model's input but what its tensors hold, in the same words in
    every process.

    That is the type of mixed precision, plain values, and the types and dimensions of tensors.

    Args:
        batch: the model's input.
        num_rows: its samples B; a first axis of so many does not count.
        shapes: whether the sizes of the tensors count too.
        shared: paths of tensors that are shared by the samples, however long their first axis is.
    """
    parts = [repr(batch.autocast)]
    for name, value in batch.contents:
        if isinstance(value, Tensor):
            shape = tuple(value.shape)[name not in shared and value.shape[:1] == (num_rows,) :]
            parts.append(f"{name!r} {value.dtype} {shape if shapes else len(shape)}")
        else:
            parts.append(f"{name!r} {type(value).__qualname__} {value!r}")
    return "\n".join(parts)


def described(prints: np.ndarray, description: str) -> np.ndarray:
    """Return fingerprints [B, 2] that agree only where what `describe` returned is the same too.

    The first number of each stays as it is: by that inputs that have changed can be told from those
    in another batch.
    """
    digest = int.from_bytes(hashlib.blake2b(description.encode(), digest_size=3).digest(), "little")
    return np.stack(
        [prints[:, 0], (prints[:, 1].astype(np.int32) ^ digest).astype(np.float32)], axis=1
    )


def agree(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return for each row of two arrays of fingerprints [B, 2] whether they stem from equal input:
    bool [B].
    """
    return np.asarray((first == second).all(axis=-1))


def _named_tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    for tensor in tree.leaves(args):
        yield "", tensor
    for name in sorted(
        kwargs.keys() - {OF_THE_LOSS}
    ):  # the order in which a caller names them means nothing
        for tensor in tree.leaves(kwargs[name]):
            yield name, tensor


def _without_padding(name: str, tensor: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    if tensor.dim() != 2 or tensor.is_floating_point() or tensor.is_complex() or name in MASKS:
        return tensor
    if "label" in name:
        tensor = tensor.masked_fill(tensor == IGNORED_LABEL, 0)
    for mask in map(kwargs.get, MASKS):
        if isinstance(mask, Tensor) and mask.shape == tensor.shape and mask.device == tensor.device:
            return tensor * mask
    return tensor


def _hashes(tensor: Tensor, index: int) -> Tensor:
    """Return one integer for each entry of the first axis: int64 [B]."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor[:1].numel() == 0:
        return torch.zeros(len(tensor), dtype=torch.int64, device=tensor.device)
    channels_last = _is_channels_last(tensor)
    if not channels_last:
        tensor = tensor.reshape(len(tensor), -1)
    factors, weights = _random(tensor.shape[1:], channels_last, _exact(tensor), tensor.device)
    num_rows = (
        max(1, PART_ELEMENTS // factors.numel()) if tensor.device.type == "cpu" else len(tensor)
    )
    sums = [
        _sums(part.to(factors.dtype), factors, weights) for part in torch.split(tensor, num_rows)
    ]
    mantissas, exponents = sums[0] if len(sums) == 1 else map(torch.cat, zip(*sums, strict=True))
    return mantissas.long() * _salt(2 * index) + exponents.long() * _salt(2 * index + 1)


def _sums(values: Tensor, factors: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Add up the bits of the products, and their signs and exponents with weights; overflow wraps,
    which is as good.

    The second sum is for values that differ in sign or by a power of two: their products have the
    same mantissa, so that in the first sum alone they could change places unnoticed.
    """
    products = (values * factors).view(weights.dtype)
    axes = list(range(1, values.dim()))
    mantissas = products.sum(axes, dtype=weights.dtype)
    products.bitwise_right_shift_(MANTISSA_BITS[weights.dtype]).mul_(weights)
    return mantissas, products.sum(axes, dtype=weights.dtype)


def _exact(tensor: Tensor) -> torch.dtype:
    """Return the type that holds its values exactly: float32, or float64 (integers up to 2^53)."""
    wide = (
        tensor.dtype in (torch.int32, torch.int64, torch.float64) and tensor.device.type != "mps"
    )  # has no float64
    return torch.float64 if wide else torch.float32


def _is_channels_last(values: Tensor) -> bool:
    return (
        values.dim() == 4
        and not values.is_contiguous()
        and values.is_contiguous(memory_format=torch.channels_last)
    )


@lru_cache(maxsize=16)
def _random(
    shape: torch.Size, channels_last: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return for the elements of one row fixed random factors in [1, 2) and odd integers, in its
    order in memory.

    From the raw output of the bit generator, one word for each number: so the numbers for a longer
    row begin with those for a shorter one, and no release of a library gives others.
    """
    raw = np.random.PCG64(SEED).random_raw(2 * shape.numel()).reshape(-1, 2)
    if dtype == torch.float32:
        factors = ((raw[:, 0] >> np.uint64(41)).astype(np.uint32) | np.uint32(0x7F << 23)).view(
            np.float32
        )
        weights = (raw[:, 1] >> np.uint64(32)).astype(np.uint32).view(np.int32) | np.int32(1)
    else:
        factors = ((raw[:, 0] >> np.uint64(12)) | np.uint64(0x3FF << 52)).view(np.float64)
        weights = raw[:, 1].astype(np.int64) | np.int64(1)
    pair = [torch.from_numpy(numbers).to(device).view(1, *shape) for numbers in (factors, weights)]
    if channels_last:
        pair = [numbers.contiguous(memory_format=torch.channels_last) for numbers in pair]
    return pair[0], pair[1]


@lru_cache(maxsize=256)
def _salt(index: int) -> int:
    """Return an odd number that sets the tensor at this place apart from those at others."""
    return int(np.random.PCG64(SALT_SEED).random_raw(index + 1)[-1].astype(np.int64)) | 1


def _folded(totals: np.ndarray) -> np.ndarray:
    """Mix 64-bit sums and keep 48 bits of them, 24 in each of two float32, which hold so many
    exactly.
    """
    mixed = totals.astype(np.uint64)
    for _ in range(2):
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    low = (mixed >> np.uint64(16)) & np.uint64(0xFFFFFF)
    return np.stack([mixed >> np.uint64(40), low], axis=1).astype(np.float32)
