"""Rank and world size: the one place that asks `torch.distributed`."""

from __future__ import annotations

from torch import distributed


def is_initialized() -> bool:
    """Return whether there is a process group, so that a wrapper may come around the model."""
    return distributed.is_available() and distributed.is_initialized()


def world_size() -> int:
    """Return the number of processes of the job; 1 where no process group is set up."""
    return distributed.get_world_size() if is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 where no process group is set up."""
    return distributed.get_rank() if is_initialized() else 0
