"""Exchanging a few numbers between the processes of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed


class Numbers:
    """Carries rows of numbers between the ranks of a process group, without any device waiting for them.

    Args:
        group: the process group; one for the CPU is made of its ranks where it has none. All ranks make it together.
    """

    def __init__(self, group: Any) -> None:
        self._num_ranks = distributed.get_world_size(group)
        self._group = _group_on_the_cpu(group)

    def exchange(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all processes, by rank; they have the same length.

        Raises:
            RuntimeError: a process did not answer within the timeout of the process group.
        """
        mine = torch.tensor(row, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self._num_ranks)]
        distributed.all_gather(rows, mine, group=self._group)
        return [entry.tolist() for entry in rows]


def _group_on_the_cpu(group: Any) -> Any:
    """Return a process group of the same ranks that carries numbers of the CPU, so that no device waits for them."""
    if "cpu:" in distributed.get_backend_config(group):
        return group
    return distributed.new_group(
        ranks=distributed.get_process_group_ranks(group),
        backend="gloo",
        timeout=_timeout(group),
        use_local_synchronization=True,
    )


def _timeout(group: Any) -> Any:
    """Return how long a group waits for its ranks; None for the default of gloo, where it does not tell."""
    try:
        return group._get_backend(torch.device("cuda")).options._timeout
    except (RuntimeError, AttributeError):
        return None
