"""Our failures are ours to bear: they are told, and where they go on, freezing ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from egeria.session.applier import HarmfulFreezeError
from egeria.session.engine import Engine
from egeria.session.ranks import LostError, OutOfStepError, Ranks
from egeria.session.recorder import Recorder

FAULTS_BEFORE_GIVING_UP = 3


class Freezing(Protocol):
    """What judges and freezes, and can be made to stop."""

    @property
    def engine(self) -> Engine | None:
        """The parts of it; None once they are released."""
        ...

    def release(self) -> None:
        """Thaw everything, for good."""
        ...


class Faults:
    """Runs the steps of a session so that none of them can stop or change the user's training.

    Args:
        ranks: the processes of the job: where there are several, they stop freezing at the same step.
        recorder: where failures are told.
        freezing: what ends where failures go on.
    """

    def __init__(self, ranks: Ranks, recorder: Recorder, freezing: Freezing) -> None:
        self._ranks = ranks
        self._recorder = recorder
        self._freezing = freezing
        self._in_a_row: dict[str, int] = {}

    def bear(self, where: str, action: Callable[[], object]) -> None:
        """Run one of our own steps, whatever comes of it."""
        try:
            try:
                action()
                self._in_a_row.pop(where, None)
            except (OutOfStepError, LostError):
                raise
            except HarmfulFreezeError as error:
                self.stop_freezing(str(error))
            except Exception as error:
                self._take_note(where, error)
        except OutOfStepError as error:
            self._freezing.release()
            self._recorder.decline("freezing", str(error))
        except LostError as error:  # to thaw alone would part this process from the others
            self._recorder.decline("freezing and thawing any further", str(error))

    def stop_freezing(self, reason: str) -> None:
        """Thaw for good; among several processes at the same step as the others.

        Raises:
            OutOfStepError: the others know.
            LostError: they cannot be reached.
        """
        if self._ranks.is_alone:
            self._freezing.release()
        self._recorder.decline("freezing", reason, by_this_process=True)
        self._ranks.leave()

    def _take_note(self, where: str, error: Exception) -> None:
        self._recorder.fault(where, error)
        count = self._in_a_row[where] = self._in_a_row.get(where, 0) + 1
        engine = self._freezing.engine
        if engine is None:
            return
        engine.evaluator.disarm()
        out_of_step = engine.policy.frozen != engine.applier.decided_depth
        if out_of_step or count >= FAULTS_BEFORE_GIVING_UP or self._ranks.are_meeting:
            self.stop_freezing(f"{where} failed {count} times in a row, last with: {error}")
