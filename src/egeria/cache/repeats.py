"""Whether inputs come again just as they were: by the numbers of samples, or by what they hold alone."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from egeria.cache.fingerprint import agree, describe, row_hashes
from egeria.layers.batch import Batch

MAX_WATCHED = 512
"""Samples whose first input is remembered."""
NEEDED = 32
"""Samples seen twice before there is a verdict."""


class RepeatedInputs:
    """Distinguishes a data set that gives a sample as it is from one that augments it at random.

    The data set itself is never called for this: the inputs of the training forwards are compared, by
    fingerprint, for the first samples that come round again.
    """

    def __init__(self) -> None:
        self._first: dict[int, np.ndarray] = {}
        self._num_equal = 0
        self._num_other = 0

    def note_random(self) -> None:
        """Take it as known that inputs are random."""
        self._num_equal, self._num_other = 0, NEEDED

    @property
    def verdict(self) -> bool | None:
        """True if inputs repeat, False if they are random, None while too few came twice."""
        if self._num_equal + self._num_other < NEEDED:
            return None
        return self._num_equal > self._num_other

    def wants(self, samples: np.ndarray) -> bool:
        """Return whether the fingerprints of these samples [B] would teach anything."""
        if self.verdict is not None:
            return False
        return len(self._first) < MAX_WATCHED or any(int(sample) in self._first for sample in samples)

    def observe(self, samples: np.ndarray, prints: np.ndarray) -> None:
        """Take in the samples of a batch [B] and the fingerprints of their inputs [B, 2]."""
        for sample, print_ in zip(samples.tolist(), prints, strict=True):
            first = self._first.get(sample)
            if first is None:
                if len(self._first) < MAX_WATCHED:
                    self._first[sample] = print_
            elif bool(agree(first[None], print_[None])[0]):
                self._num_equal += 1
            else:
                self._num_other += 1


WATCHED_BATCHES = 32
"""Batches of each epoch that are looked at."""
LEAST_EXPECTED = 8
"""Samples that must have had the chance to come again before there is a share."""


class RepeatedContents:
    """Which share of the samples comes again just as it was in the epoch before, by what some batches hold.

    Of each of the first two epochs the same batches are looked at, by their places: all samples of these come again
    where batches keep their order, as many as chance brings where they are shuffled. A sentence that is padded to
    another length is another input. Nothing waits for an accelerator before the share is asked for.

    Args:
        num_batches: of an epoch.
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches, self._period = num_batches, max(1, num_batches // WATCHED_BATCHES)
        self._num_seen = 0
        self._hashes: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Of the first epoch and of the second."""

    def wants_next(self) -> bool:
        """Count a batch; return whether it is to be observed."""
        epoch, place = divmod(self._num_seen, self._num_batches)
        self._num_seen += 1
        return epoch < 2 and place % self._period == 0

    def observe(self, batch: Batch, num_rows: int) -> None:
        """Take in the batch that was counted last, of so many samples."""
        hashes = row_hashes(batch.args, batch.kwargs, num_rows)
        if hashes is not None:
            digest = hashlib.blake2b(describe(batch, num_rows, shapes=True).encode(), digest_size=7).digest()
            self._hashes[self._num_seen > self._num_batches].append(hashes + int.from_bytes(digest, "little"))

    def share(self) -> tuple[float, str] | None:
        """Return the share, and it in words; None where too little was seen. On an accelerator this waits for it."""
        first, second = (torch.cat([own.cpu() for own in part]).tolist() if part else [] for part in self._hashes)
        if not first or not second:
            return None
        num_samples = self._num_batches * len(first) / len(self._hashes[0])
        expected = len(second) * min(1.0, len(first) / num_samples)
        if expected < LEAST_EXPECTED:
            return None
        known = set(first)
        found = sum(entry in known for entry in second)
        words = f"of {len(second)} samples {found} were among {len(first)} of the epoch before"
        return min(1.0, found / expected), words
