"""`ActivationCache`: how the forward pass of the frozen front is done, decided anew whenever the
boundary moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from egeria.cache.decision import GenerationOpener, Outlook, Share
from egeria.cache.forward_modes import (
    PlainForward,
    Rollback,
    StaleError,
    TimedForward,
    UserForward,
    is_users_own,
)
from egeria.cache.generation import LEAST_ROWS, Generation
from egeria.cache.loader import SampleFeed
from egeria.cache.samples import BatchIndices, NoSamplesError
from egeria.cache.store.directory import CacheDirectory
from egeria.cache.store.rows import StoreError
from egeria.config import CacheConfig
from egeria.errors import UncacheableError, without_frames
from egeria.events import CacheDecided
from egeria.journal import Recorder
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.skipping.crossing import check_runs_once

WHAT = "the activation cache"
OTHER_LOADER = (
    "the loader given to attach does not hand out the batches that the model is called with; give "
    "it the one that the "
    "loop iterates over, such as `accelerator.prepare` returns"
)
REPORT_BATCHES = 500
"""Batches between two entries in the journal on how a generation does."""


@dataclass(kw_only=True, eq=False, slots=True)
class ActivationCache:
    """Makes the training forwards of a model with a frozen front.

    Behind a new boundary the forward pass is left as it is for a few iterations, whose pace is
    measured. Then activations are stored, or nothing is done, until the boundary moves again.
    Whatever fails, the user's forward is made as it is, and what failed stays off.
    """

    model: nn.Module
    feed: SampleFeed | None
    """Knows the samples of batches; None where they cannot be identified."""
    make_directory: Callable[[], CacheDirectory]
    settings: CacheConfig
    recorder: Recorder
    spend: Callable[[float, float], None]
    """Takes wall-clock and CPU seconds that were ours and not the user's."""
    refusal: str = ""
    """Why there is no feed, or nothing is stored any more."""
    share: Share = field(default_factory=Share)
    """With whom stores are shared."""
    mode: PlainForward | Generation = field(default_factory=PlainForward)
    """How they are made now."""
    _directory: CacheDirectory | None = None
    _longest: int | None = None
    _most_rows: int = 0
    _modules: tuple[LayerModule, ...] = ()
    _outlook: Outlook = field(default_factory=partial(Outlook, steps_ahead=None))
    _number: int = 0
    _rollback: Rollback | None = None
    _has_reported_damage: bool = False
    _is_other_loader: bool = False
    """Whether nothing is stored only because the batches come from another loader, so far."""

    def move_boundary(self, modules: Sequence[LayerModule], outlook: Outlook) -> None:
        """Take note that other layer modules are frozen now; what is stored is of no use any more.

        Args:
            modules: the frozen layer modules, front to back; none after a thaw.
            outlook: the time to come.
        """
        self._modules, self._outlook, self._number = (
            tuple(modules),
            outlook,
            self.share.number_at(self._number),
        )
        self._switch_to(self._timed_forward() if modules else PlainForward())
        if not modules and self._number:
            self._record("computed", "nothing is frozen any more")

    def forward(self, call: Callable[[], Any], batch: Batch) -> Any:
        """Make a training forward.

        Args:
            call: the user's forward of the model.
            batch: its arguments.
        """
        user_forward = UserForward(call)
        try:
            indices = self._indices_of(batch)
            self._observe(batch)
            self._choose_mode(batch, indices)
            if self._rollback is not None:
                self._rollback.save()
            output = self.mode.forward(user_forward, batch, indices)
            if self._rollback is not None:
                self._rollback.forget()
            return output
        except Exception as error:
            if user_forward.was_plain:
                raise  # the user's own forward failed, with nothing of ours in it
            failure = without_frames(error)
        if user_forward.was_called and self._rollback is not None:
            self._rollback.restore()
        output = call()  # if that fails too it is not our fault, and nothing has to be given up
        self._fall_back(failure, output)
        return output

    def report(self) -> None:
        """Write into the journal how the present generation does."""
        if isinstance(self.mode, Generation):
            self.recorder.write(self.mode.used(self.recorder.step))

    def close(self) -> None:
        """Stop everything, give the loader back and delete what was stored; more than once is no
        error.
        """
        self._switch_to(PlainForward())
        self._modules = ()
        if self.feed is not None:
            self.feed.close()
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def _indices_of(self, batch: Batch) -> BatchIndices | None:
        """Return the samples of a batch; None if they are not known, or so few that other kernels
        run.
        """
        try:
            indices = None if self.feed is None else self.feed.take(batch.arguments)
            num_rows = 0 if indices is None else len(indices.samples)
            self._most_rows = max(self._most_rows, num_rows)
            return indices if num_rows >= min(LEAST_ROWS, self._most_rows) else None
        except NoSamplesError as error:
            self.recorder.decline("storing activations", str(error))
            self.refusal = str(error)
            if self.feed is not None:
                self.feed.close()
            self.feed = None
            return None

    def _observe(self, batch: Batch) -> None:
        """Learn how long samples can be, and tell of damaged rows."""
        if type(self.mode) is not PlainForward:
            check_runs_once()
        mask = batch.kwargs.get("attention_mask")
        if getattr(mask, "ndim", 0) == 2:
            self._longest = max(self._longest or 0, int(mask.shape[1]))  # type: ignore[union-attr]
        if isinstance(self.mode, Generation):
            if self.mode.use.batches % REPORT_BATCHES == REPORT_BATCHES - 1:
                self.report()
            num_damaged = self.mode.store.num_damaged
            if num_damaged and not self._has_reported_damage:
                self._has_reported_damage = True
                reason = (
                    f"{num_damaged} of them were damaged, by the disk or another program; "
                    "they are computed again"
                )
                self.recorder.fault("reading stored activations", StoreError(reason))

    def _choose_mode(self, batch: Batch, indices: BatchIndices | None) -> None:
        """Choose how the coming forward is made, where there is something new to go by."""
        if self._is_other_loader and indices is not None:
            self._switch_to(self._timed_forward())
        if isinstance(self.mode, TimedForward) and self.mode.has_seen_enough(
            indices is not None or self.feed is None
        ):
            decide = partial(self._decide, batch, indices, self.mode)
            self.share.decide(
                self.place, self._number + 1, decide, lambda: isinstance(self.mode, Generation)
            )
        if isinstance(self.mode, Generation) and (reason := self.mode.payback.complaint()):
            self._compute(reason, {})

    def _decide(self, batch: Batch, indices: BatchIndices | None, timed: TimedForward) -> None:
        """Choose how the forward pass is done from here on."""
        begin, begin_cpu = time.perf_counter(), time.process_time()
        self._number += 1
        reason = self.refusal or self.share.refusal(self.feed)
        numbers: dict[str, float] = {}
        if not reason and indices is None:
            reason = OTHER_LOADER
            self.recorder.decline(WHAT, reason)
        if not reason and indices is not None:
            try:
                reason, numbers = self._try_to_store(batch, indices, timed)
            except UncacheableError as error:
                reason = str(error)
                self.recorder.decline(f"{WHAT} behind {self._modules[-1].name}", reason)
            except StoreError as error:
                reason = self.refusal = str(error)
                self.recorder.decline(WHAT, reason)
        if reason:
            self._compute(reason, numbers)
        self._is_other_loader = reason == OTHER_LOADER
        self.spend(time.perf_counter() - begin, time.process_time() - begin_cpu)

    def _try_to_store(
        self, batch: Batch, indices: BatchIndices, timed: TimedForward
    ) -> tuple[str, dict[str, float]]:
        """Open a generation where it pays; return why not, or an empty reason, and the numbers that
        decided.
        """
        assert self.feed is not None
        opener = GenerationOpener(
            model=self.model,
            modules=self._modules,
            feed=self.feed,
            settings=self.settings,
            batch=batch,
            indices=indices,
            timed=timed,
            outlook=self._outlook,
            longest=self._longest,
            number=self._number,
        )
        if self.share.leads:
            generation, reason, numbers = opener.open(self.place)
        else:
            generation, reason, numbers = opener.join(self.place())
        if generation is None:
            return reason, numbers
        self._switch_to(generation)
        self._record("stored", reason, numbers)
        return "", numbers

    def _compute(self, reason: str, numbers: dict[str, float]) -> None:
        """Compute the frozen front until the boundary moves."""
        self._switch_to(PlainForward())
        self._record("computed", reason, numbers)

    def _fall_back(self, error: Exception, output: Any) -> None:
        """Give up on the present forward mode, and say why; not where the plain `output` shows that
        it is right.
        """
        if is_users_own(error, output):
            return
        failed = self.mode
        self._switch_to(PlainForward())
        if isinstance(error, (StaleError, StoreError, UncacheableError)):
            self.recorder.decline(WHAT, str(error))
        else:
            self.recorder.fault("skipping the frozen forward pass", error)
        if isinstance(failed, (Generation, TimedForward)):
            self.refusal = f"it was turned off: {error}"
        self._record("computed", str(error))

    def _timed_forward(self) -> TimedForward:
        return TimedForward.of(self.model, self._modules, self.settings.gate)

    def _switch_to(self, mode: PlainForward | Generation) -> None:
        self.report()
        self.mode.close()
        self.mode, self._has_reported_damage, self._is_other_loader = mode, False, False
        self._rollback = Rollback(self.model) if isinstance(mode, Generation) else None

    def place(self) -> CacheDirectory:
        """Return where stores go, made when it is first asked for. Raises `StoreError`."""
        self._directory = self._directory or self.make_directory()
        return self._directory

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
