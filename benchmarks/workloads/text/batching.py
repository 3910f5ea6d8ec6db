"""Batches of sentences: samples of similar length together, padded on the right."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

POOL_BATCHES = 40
"""Batches whose samples are sorted by length together: enough for little padding, few enough for chance."""


class LengthBatches(Sampler[list[int]]):
    """Full batches of samples of similar length, others in each pass.

    What does not fill a batch is left out of the pass, by chance and not by its length.

    Args:
        lengths: of the samples, in tokens.
        batch_size: samples of a batch.
        generator: draws which samples meet, and the order of the batches.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, generator: torch.Generator) -> None:
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size
        self.generator = generator

    def __len__(self) -> int:
        return len(self.lengths) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.lengths), generator=self.generator)[: len(self) * self.batch_size]
        batches: list[Tensor] = []
        for pool in order.split(self.batch_size * POOL_BATCHES):
            by_length = pool[self.lengths[pool].argsort(stable=True)]
            batches.extend(by_length.split(self.batch_size))
        for index in torch.randperm(len(batches), generator=self.generator).tolist():
            yield batches[index].tolist()


def sorted_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return all samples in batches from short to long, for evaluation; the last batch may be smaller."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]


def pad_rows(rows: Sequence[Tensor], value: int) -> tuple[Tensor, Tensor]:
    """Pad rows on the right.

    Returns:
        Numbers [B, T], and the mask [B, T] that is 1 where a row has a token of its own.
    """
    lengths = torch.tensor([len(row) for row in rows])
    padded = pad_sequence(list(rows), batch_first=True, padding_value=value)
    return padded, (torch.arange(padded.shape[1]) < lengths[:, None]).long()


def shuffled_loader(
    dataset: Dataset[Any], lengths: Sequence[int], batch_size: int, seed: int
) -> DataLoader[dict[str, Tensor]]:
    """Return a loader of batches of similar length over a data set that makes whole batches."""
    generator = torch.Generator().manual_seed(seed)
    batches = LengthBatches(lengths, batch_size, generator)
    # A generator of its own for the loader too: it draws a number in each pass, from torch's global one otherwise.
    return DataLoader(
        dataset, batch_sampler=batches, collate_fn=_as_made, generator=torch.Generator().manual_seed(seed)
    )


def moved(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the batch on the device."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def _as_made(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch
