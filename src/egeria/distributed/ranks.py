"""Agreement between ranks: every decision is made from the same values on all of them.

All ranks call `together` and `exchange` in the same order, outside forward and backward passes.
"""

import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from egeria.errors import EgeriaError, brief

T = TypeVar("T")
TIMEOUT_S = 600  # NCCL's own: a rank may validate or save alone for minutes


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


def exchange(value: Any, call: str = "run.step") -> list[Any]:
    """Return the values of all ranks, in order; they can be anything that can be pickled.

    Args:
        value: of this rank.
        call: what the user calls: all ranks have to be in the same.

    Raises:
        RankError: another rank is in another call.
        LostError: a rank did not come within `TIMEOUT_S`, or that of the process group.
    """
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    with suppress(Exception):  # it only serves the message of a LostError
        _count(call, rank(), 1)
    try:
        distributed.all_gather_object(found, (call, value), group=_own_group())
    except Exception as error:
        raise LostError(_describe_loss(call, error)) from error
    calls = [name for name, _ in found]
    if len(set(calls)) > 1:
        where = ", ".join(f"rank {place} is in {name}" for place, name in enumerate(calls))
        raise RankError(f"the ranks are in different calls: {where}. Make each on all ranks")
    return [answer for _, answer in found]


def together(work: Callable[[], T], call: str = "run.step") -> list[T]:
    """Do `work` on every rank and return all results, in order; they can be pickled.

    Raises:
        RankError: it failed on one of several ranks, or another rank is in another call. Without
            other ranks its own error is raised.
        LostError: a rank did not come.
    """
    if world_size() == 1:
        return [work()]
    fault, answer = None, b""
    try:
        answer = pickle.dumps(work())  # here, where a failure still reaches the other ranks
    except Exception as error:
        fault = error
    answers = exchange((answer, brief(fault) if fault else ""), call)
    _raise_faults([text for _, text in answers], fault)
    return [pickle.loads(found) for found, _ in answers]


def _raise_faults(texts: list[str], own: Exception | None = None) -> None:
    if faults := [f"rank {place}: {text}" for place, text in enumerate(texts) if text]:
        raise RankError("; ".join(faults)) from own


@contextmanager
def all_or_none(call: str) -> Iterator[None]:
    """Raise on all ranks in `call` what the block raises on one: its own error there."""
    try:
        yield
    except Exception as error:
        with suppress(RankError, LostError):
            exchange(brief(error), call)
        raise
    _raise_faults(exchange("", call))


# By default process group, the group on the CPU that was made for it: one of our own, so that no
# exchange meets one of the training loop.
_made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _own_group() -> Any:
    """Return a process group of all ranks for values on the CPU; all ranks call this together."""
    world: Any = distributed.group.WORLD
    if world not in _made:
        limit = timedelta(seconds=TIMEOUT_S)
        for kind in ("cpu", "cuda"):
            with suppress(RuntimeError, AttributeError):
                limit = min(limit, world._get_backend(torch.device(kind)).options._timeout)
        _made[world] = distributed.new_group(backend="gloo", timeout=limit)
    return _made[world]


def _count(call: str, place: int, more: int = 0) -> int:
    """Return how often a rank has come to a call, as the store of the job knows on all of them."""
    store: Any = distributed.distributed_c10d._get_default_store()
    return int(store.add(f"egeria/{place}/{call}", more))


def _describe_loss(call: str, error: Exception) -> str:
    missing = list[str]()
    with suppress(Exception):  # the store is gone with the rank that held it
        counts = [_count(call, place) for place in range(world_size())]
        missing = [f"rank {place}" for place, n in enumerate(counts) if n < counts[rank()]]
    who = f"{', '.join(missing)} did not come to {call}" if missing else f"in {call}"
    return f"the ranks could not reach each other: {who} ({brief(error)}). Call it on all ranks"
