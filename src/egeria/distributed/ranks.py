"""Agreement between ranks: every decision is made from the same values on all of them.

All ranks call `together` and `exchange` in the same order, outside forward and backward passes.
"""

import pickle
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import distributed

from egeria.errors import EgeriaError, brief

T = TypeVar("T")


class RankError(EgeriaError):
    """A rank failed, as the message says; raised on all ranks in the same exchange."""


class LostError(EgeriaError):
    """The ranks cannot reach each other: the frozen depth must stay as it is on all of them."""


def is_initialized() -> bool:
    """Return whether there is a process group, so that the model may get a wrapper."""
    return distributed.is_available() and distributed.is_initialized()


def world_size() -> int:
    """Return the number of ranks of the job; 1 without a process group."""
    return distributed.get_world_size() if is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return distributed.get_rank() if is_initialized() else 0


def exchange(value: Any) -> list[Any]:
    """Return the values of all ranks, in order; they can be anything that can be pickled.

    Raises:
        LostError: a rank did not answer within the timeout of the process group.
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    try:
        distributed.all_gather_object(values, value, group=_cpu_group())
    except Exception as error:
        raise LostError(f"the ranks could not reach each other ({brief(error)})") from error
    return values


def together(work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank and return all results, in order; they can be pickled.

    Raises:
        RankError: it failed on one of several ranks. Without other ranks its own error is raised.
        LostError: a rank did not answer within the timeout of the process group.
    """
    if world_size() == 1:
        return [work()]
    fault, answer = None, b""
    try:
        answer = pickle.dumps(work())  # here, where a failure still reaches the other ranks
    except Exception as error:
        fault = error
    answers = exchange((answer, brief(fault) if fault else ""))
    if faults := [f"rank {index}: {text}" for index, (_, text) in enumerate(answers) if text]:
        raise RankError("; ".join(faults)) from fault
    return [pickle.loads(found) for found, _ in answers]


# By default process group, the group on the CPU that was made for it.
_made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _cpu_group() -> Any:
    """Return a process group of all ranks for values on the CPU; all ranks call this together."""
    world: Any = distributed.group.WORLD
    if "cpu:" in distributed.get_backend_config(world):
        return world
    if world not in _made:
        timeout = None  # the default of gloo
        with suppress(RuntimeError, AttributeError):
            timeout = world._get_backend(torch.device("cuda")).options._timeout
        _made[world] = distributed.new_group(backend="gloo", timeout=timeout)
    return _made[world]
