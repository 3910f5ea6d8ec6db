"""`Cache`: how the forward pass of the frozen front is made, decided anew whenever the boundary
moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from egeria.cache.decision import Outlook
from egeria.cache.forward_modes import PlainForward, TimedForward, UserForward, is_users_own
from egeria.cache.memory_forward import count_rows
from egeria.cache.samples import BatchIndices
from egeria.cache.store.codec import StoreError
from egeria.cache.stored import LEAST_ROWS, StoredForward
from egeria.config import CacheConfig
from egeria.errors import EgeriaError, UncacheableError, without_frames
from egeria.events import CacheDecided
from egeria.journal import Recorder
from egeria.model.batch import Batch
from egeria.model.cut import LayerModule
from egeria.skipping.crossing import check_runs_once

WHAT = "the activation cache"
REPORT_BATCHES = 500
"""Batches between two entries in the journal on how a generation does."""

Opening = tuple[StoredForward | None, str, dict[str, float]]
"""What serves forwards from here on, or None; why, and the numbers that decided."""


@dataclass(kw_only=True, eq=False)
class Cache:
    """Makes the training forwards of a model with a frozen front.

    Behind a new boundary the forward pass is left as it is for a few iterations, whose pace is
    measured. Then activations are stored, or nothing is done, until the boundary moves again.
    Whatever fails, the user's forward is made as it is, and what failed stays off.
    """

    model: nn.Module
    settings: CacheConfig
    recorder: Recorder
    spend: Callable[[float, float], None]
    """Takes wall-clock and CPU seconds that were ours and not the user's."""
    refusal: str = ""
    """Why nothing is stored, or nothing any more."""
    mode: PlainForward = field(default_factory=PlainForward)
    """How they are made now."""
    _modules: tuple[LayerModule, ...] = ()
    _outlook: Outlook = field(default_factory=partial(Outlook, steps_ahead=None))
    _number: int = 0
    _most_rows: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether forward passes are made as they are, until the boundary moves."""
        return type(self.mode) is PlainForward

    def move_boundary(self, modules: Sequence[LayerModule], outlook: Outlook) -> None:
        """Take note that other layer modules are frozen now, and free what was stored.

        Args:
            modules: the frozen layer modules, front to back; none after a thaw.
            outlook: the time to come.
        """
        was_stored = isinstance(self.mode, StoredForward)
        self._modules, self._outlook = tuple(modules), outlook
        self._switch_to(PlainForward())
        self._number += bool(modules)
        if not modules:
            if was_stored:
                self._record("computed", "nothing is frozen any more")
        elif self.refusal:
            self._record("computed", self.refusal)
        else:
            self._watch()

    def forward(self, call: Callable[[], Any], batch: Batch) -> Any:
        """Make a training forward.

        Args:
            call: the user's forward of the model.
            batch: its arguments.
        """
        user_forward = UserForward(call)
        try:
            indices, num_rows = self._find_samples(batch), count_rows(batch)
            self._most_rows = max(self._most_rows, num_rows)
            if num_rows < min(LEAST_ROWS, self._most_rows):  # other kernels run
                return user_forward(plain=True)
            self._choose_mode(batch, indices)
            return self.mode.forward(user_forward, batch, indices)
        except Exception as error:
            if user_forward.was_plain:
                raise  # the user's own forward failed, with nothing of ours in it
            failure = without_frames(error)
        if user_forward.was_called and isinstance(self.mode, StoredForward):
            self.mode.rollback.restore()
        output = call()  # if that fails too it is not our fault, and nothing has to be given up
        if not is_users_own(failure, output):
            self._give_up(failure)
        return output

    def report(self) -> None:
        """Write into the journal how the present generation does."""
        if isinstance(self.mode, StoredForward):
            self.recorder.write(self.mode.used(self.recorder.step))

    def close(self) -> None:
        """Stop everything and free what was stored; more than once is no error."""
        self._switch_to(PlainForward())
        self._modules = ()

    def _find_samples(self, batch: Batch) -> BatchIndices | None:
        """Return the samples of a batch, where that matters."""
        return None

    def _open(self, batch: Batch, indices: BatchIndices | None, timed: TimedForward) -> Opening:
        """Return what stores from here on, where that pays.

        Raises UncacheableError where the front cannot be skipped, and StoreError where the disk
        cannot be used.
        """
        raise NotImplementedError

    def _decline(self, what: str, reason: str) -> None:
        """Say why nothing is stored, where the user asked for it."""

    def _has_seen_enough(self, timed: TimedForward, indices: BatchIndices | None) -> bool:
        return timed.has_seen_enough()

    def _choose_mode(self, batch: Batch, indices: BatchIndices | None) -> None:
        """Choose how the coming forward is made, where there is something new to go by."""
        mode = self.mode
        if isinstance(mode, TimedForward) and self._has_seen_enough(mode, indices):
            self._decide(batch, indices, mode)
        elif isinstance(mode, StoredForward):
            if mode.use.batches % REPORT_BATCHES == REPORT_BATCHES - 1:
                self.report()
            if reason := mode.payback.complaint():
                self._compute(reason)

    def _decide(self, batch: Batch, indices: BatchIndices | None, timed: TimedForward) -> None:
        """Choose how the forward pass is done from here on."""
        begin, begin_cpu = time.perf_counter(), time.process_time()
        try:
            check_runs_once()
            timed.check()
            mode, reason, numbers = self._open(batch, indices, timed)
        except (UncacheableError, StoreError) as error:
            mode, reason, numbers = None, str(error), {}
            if isinstance(error, StoreError):
                self.refusal = reason
                self._decline(WHAT, reason)
            else:
                self._decline(f"{WHAT} behind {self._modules[-1].name}", reason)
        if mode is None:
            self._compute(reason, numbers)
        else:
            self._switch_to(mode)
            self._record("stored", reason, numbers)
        self.spend(time.perf_counter() - begin, time.process_time() - begin_cpu)

    def _give_up(self, failure: Exception) -> None:
        """Compute for the rest of the run, and say why."""
        if isinstance(failure, EgeriaError):
            self._decline(WHAT, str(failure))
        else:
            self.recorder.fault("skipping the frozen forward pass", failure)
        self.refusal = f"it was turned off: {failure}"
        self._compute(str(failure))

    def _compute(self, reason: str, numbers: dict[str, float] | None = None) -> None:
        """Compute the frozen front until the boundary moves."""
        self._switch_to(PlainForward())
        self._record("computed", reason, numbers)

    def _watch(self) -> None:
        """Measure the pace of the forward pass as it is."""
        self._switch_to(TimedForward.of(self.model, self._modules, self.settings.gate))

    def _switch_to(self, mode: PlainForward) -> None:
        self.report()
        self.mode.close()
        self.mode = mode

    def _record(self, mode: str, reason: str, numbers: dict[str, float] | None = None) -> None:
        self.recorder.write(
            CacheDecided(
                step=self.recorder.step,
                boundary=self._modules[-1].name if self._modules else "",
                generation=self._number,
                mode=mode,
                reason=reason,
                numbers=numbers or {},
            )
        )
