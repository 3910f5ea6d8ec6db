"""Whether the input of a sample is the same each time it is drawn, learnt by watching."""

from __future__ import annotations

import numpy as np

from egeria.cache.samples.fingerprint import agree

MAX_WATCHED = 512
"""Samples whose first input is remembered."""
NEEDED = 32
"""Samples seen twice before there is a verdict."""


class Repeats:
    """Tells a data set that gives a sample as it is from one that augments it at random.

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
        """Tell whether the fingerprints of these samples [B] would teach anything."""
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
