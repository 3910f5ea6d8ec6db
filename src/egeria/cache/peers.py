"""Processes that run the frozen front together: a batch is replayed in all of them, or computed in all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

from torch import nn

from egeria.errors import UncacheableError
from egeria.layers.plain import lack_of_room, run_alone
from egeria.layers.shards import reshard


class OthersStopError(UncacheableError):
    """Nothing can be replayed behind this boundary, since another process replays nothing there."""

    def __init__(self, reason: str = "another process of the job stores nothing behind this boundary") -> None:
        super().__init__(reason)


class Peers(Protocol):
    """What a process settles with others before a training forward with a frozen front."""

    model: nn.Module
    """The model in training."""
    can_run_alone: bool
    """Whether a process can run the model, or the front of it, without the others."""

    def restart(self, *, is_frozen: bool) -> None:
        """Take note that the boundary has moved, in all processes at the same step."""
        ...

    def begin(self) -> None:
        """Take note that a forward begins."""
        ...

    def whole(self) -> nn.Module:
        """Return a model that this process can run as often as it likes, until the forward is made.

        Raises:
            Exception: there is none, for the reason that is the message.
        """
        ...

    def agree(self, *, is_ready: bool) -> bool:
        """Tell whether all are ready to replay the batch of this forward.

        Raises:
            OthersStopError: one of them will never be.
        """
        ...

    def confirm(self, *, went_well: bool) -> None:
        """Settle, behind a replayed forward, whether it went well in all; if not it is made again in all.

        Raises:
            OthersStopError: it did here, and not in all.
        """
        ...

    def settle(self, *, is_final: bool) -> None:
        """Say, if that was not settled yet, that this process is not ready; if it is final, that it will never be."""
        ...


class Alone:
    """A process that can run the model by itself, and whose forwards need nobody else.

    Args:
        model: the model in training.
    """

    can_run_alone = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def restart(self, *, is_frozen: bool) -> None:
        """Nothing is to be settled."""

    def begin(self) -> None:
        """Nothing is to be settled."""

    def whole(self) -> nn.Module:
        """Return the model."""
        return self.model

    def agree(self, *, is_ready: bool) -> bool:
        """Tell whether this process is ready."""
        return is_ready

    def confirm(self, *, went_well: bool) -> None:
        """Nothing is to be settled."""

    def settle(self, *, is_final: bool) -> None:
        """Nothing is to be settled."""


class _Vote(IntEnum):
    NEVER = 0
    WAITING = 1
    READY = 2
    WANTS = 3


class InStep:
    """Processes that hold a part of each parameter and put them together in every forward, so that all must run it.

    Each votes before a forward, as often as it takes: while one of them wants the whole model, to find out
    something about the front, all put it together, and vote again. Then the batch is replayed where all are ready,
    and computed where not. Once one says that it never will be, nobody votes any more until the boundary moves.

    Args:
        model: the model in training, its parameters in parts.
        vote: returns what all processes say, by rank.
    """

    can_run_alone = False

    def __init__(self, model: nn.Module, vote: Callable[[float], Sequence[float]]) -> None:
        self.model = model
        self._exchange = vote
        self._is_on = False
        self._owes = False

    def restart(self, *, is_frozen: bool) -> None:
        """Vote from now on if anything is frozen, and not if nothing is."""
        self._is_on, self._owes = is_frozen, False

    def begin(self) -> None:
        """Owe the others a vote; put parameters in parts that an evaluation of the loop's own has left whole."""
        self._owes = self._is_on
        if self._is_on:
            reshard(self.model)

    def whole(self) -> nn.Module:
        """Let all put the model together; return a copy of it."""
        lack = lack_of_room(self.model)
        if lack:
            raise UncacheableError(lack)
        if _Vote.NEVER in self._vote(_Vote.WANTS):
            raise OthersStopError
        return run_alone(self.model, keeps=True)

    def agree(self, *, is_ready: bool) -> bool:
        """Vote until nobody wants the model any more."""
        votes = self._end(_Vote.READY if is_ready else _Vote.WAITING)
        if _Vote.NEVER in votes:
            raise OthersStopError
        return min(votes) == _Vote.READY

    def confirm(self, *, went_well: bool) -> None:
        """Vote once more."""
        self._owes = True
        votes = self._end(_Vote.READY if went_well else _Vote.NEVER)
        if went_well and _Vote.NEVER in votes:
            raise OthersStopError("replaying a batch failed in another process of the job")

    def settle(self, *, is_final: bool) -> None:
        """Vote, if that is still owed; what fails in it shows at the next meeting of the processes."""
        if self._owes:
            try:
                self._end(_Vote.NEVER if is_final else _Vote.WAITING)
            except Exception:
                self._is_on = self._owes = False

    def _end(self, own: _Vote) -> list[float]:
        while True:
            votes = self._vote(own)
            if _Vote.WANTS not in votes or _Vote.NEVER in votes:
                self._owes = False
                return votes
            run_alone(self.model, keeps=False)

    def _vote(self, own: _Vote) -> list[float]:
        if not self._owes:
            raise OthersStopError
        try:
            votes = list(self._exchange(float(own)))
        except Exception as error:
            self._is_on = self._owes = False
            raise OthersStopError(str(error)) from error
        if _Vote.NEVER in votes:
            self._is_on = self._owes = False
        return votes
