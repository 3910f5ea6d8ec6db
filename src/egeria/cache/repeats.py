"""Whether inputs come again just as they were, by what they hold."""

from __future__ import annotations

import hashlib

from torch import Tensor

from egeria.cache.fingerprint import describe, row_hashes
from egeria.layers.batch import Batch

NUM_RUNS, RUN_BATCHES = 8, 8
"""Of each epoch so many runs of so many batches are looked at; all of an epoch that has no more."""
LEAST_EXPECTED = 60
"""Samples that would have come again by now, if all did, before there is a share: with 5 % of them
coming again that none is seen has a chance of one in twenty."""
MOST_TWICE = 0.25
"""Share of the samples that may be like another of the same epoch."""


class RepeatedContents:
    """Which share of the samples comes again just as it was in the epoch before, by what some
    batches hold.

    Of each of the first two epochs the batches at the same places are looked at: all samples of
    these come again where batches keep their order, as many as chance brings where they are
    shuffled. A sentence that is padded to another length is another input. No result is waited for
    before the share is asked for.

    Args:
        num_batches: of an epoch.
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches, self._num_seen = num_batches, 0
        self._epochs: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Hashes of the batches looked at, of the first epoch and of the second."""

    @property
    def is_over(self) -> bool:
        """Whether two epochs were seen."""
        return self._num_seen >= 2 * self._num_batches

    def wants_next(self) -> bool:
        """Count a batch; return whether it is to be observed."""
        place, self._num_seen = self._num_seen % self._num_batches, self._num_seen + 1
        if self._num_batches <= NUM_RUNS * RUN_BATCHES:
            return True
        return place % (self._num_batches // NUM_RUNS) < RUN_BATCHES

    def observe(self, batch: Batch, num_rows: int) -> None:
        """Take in the batch that was counted last, of so many samples."""
        hashes = row_hashes(batch.args, batch.kwargs, num_rows)
        if hashes is not None:
            digest = hashlib.blake2b(
                describe(batch, num_rows, shapes=True).encode(), digest_size=7
            ).digest()
            epoch = self._epochs[self._num_seen > self._num_batches]
            epoch.append(hashes + int.from_bytes(digest, "little"))

    def share(self, num_hosts: int) -> tuple[float, str] | None:
        """Return the share, and what was found in words; on an accelerator this waits.

        None where too little was seen, or inputs come more than once in an epoch, as where the
        model is called twice with each batch: then nobody knows which calls are an epoch.

        Args:
            num_hosts: processes that a sample may come to: in the epoch after it does to this one
                by chance.
        """
        first, second = ([own.cpu().tolist() for own in epoch] for epoch in self._epochs)
        known = {entry for batch in first for entry in batch}
        num_first, num_second = sum(map(len, first)), sum(map(len, second))
        if not num_second or num_first - len(known) > MOST_TWICE * num_first:
            return None
        found = sum(entry in known for batch in second for entry in batch)
        in_place = sum(
            len({*before} & {*after}) for before, after in zip(first, second, strict=False)
        )
        words = f"of {num_second} samples {found} were among {num_first} of the epoch before"
        is_ordered = in_place > found / 2
        expected = num_second * (1.0 if is_ordered else len(first) / self._num_batches / num_hosts)
        return (min(1.0, found / expected), words) if expected >= LEAST_EXPECTED else None
