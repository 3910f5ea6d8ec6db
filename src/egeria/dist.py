"""Rank and world size: the one place that asks `torch.distributed`."""

from __future__ import annotations

import torch.distributed


def world_size() -> int:
    """Return the number of processes of the job; 1 where no process group is set up."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def rank() -> int:
    """Return the rank of this process; 0 where no process group is set up."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0
