"""Sample numbers read from the batch itself, where the sampler cannot tell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from egeria import tree
from egeria.cache.samples.drawing import NoSamplesError

NAMES = ("sample_id", "example_id", "idx", "index", "id")


class IdColumn:
    """The entry of a batch that holds an integer for each row, and dense numbers for the integers seen in it.

    Args:
        name: its key; None looks for one of NAMES in the first batch.
        reason: why such a column is needed; begins the message when there is none.
    """

    def __init__(self, name: str | None, reason: str) -> None:
        self._name = name
        self._reason = reason
        self._numbers: dict[int, int] = {}

    def read(self, batch: Any) -> np.ndarray:
        """Return the sample number of each row, int64 [B]: ids are numbered in the order of first sight.

        Raises:
            NoSamplesError: there is no such column in the batch.
        """
        names = NAMES if self._name is None else (self._name,)
        for name in names:
            ids = _ids(batch, name)
            if ids is not None:
                self._name = name  # from now on this one
                numbers = self._numbers
                return np.array([numbers.setdefault(sample, len(numbers)) for sample in ids], dtype=np.int64)
        wanted = f"the key '{names[0]}'" if len(names) == 1 else "one of the keys " + ", ".join(names)
        raise NoSamplesError(
            f"{self._reason}, and the batch is no mapping with {wanted} that holds one integer for each sample: "
            "let the data set return mappings with the number of the sample under 'sample_id', or name its key"
        )


def _ids(batch: Any, name: str) -> list[int] | None:
    if not isinstance(batch, Mapping) or name not in batch:
        return None
    column = batch[name]
    if isinstance(column, Tensor):
        column = column.detach().cpu().numpy()
    try:
        ids = np.asarray(column)
    except ValueError:
        return None
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or ids.size != len(ids):
        return None
    sizes = {len(tensor) for tensor in tree.leaves(batch) if tensor.dim() and tensor is not batch[name]}
    return [int(sample) for sample in ids.reshape(-1)] if not sizes or len(ids) in sizes else None
