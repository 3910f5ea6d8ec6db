"""`ActivationCache`: how the forward pass of the frozen front is done, decided anew whenever the boundary moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from egeria.cache.decision import Outlook
from egeria.cache.generation import LEAST_ROWS, ChangedInputsError, Generation
from egeria.cache.opening import Sight, join_generation, open_generation
from egeria.cache.samples.feed import Drawn, NoSamplesError, SampleFeed
from egeria.cache.samples.fingerprint import fingerprints
from egeria.cache.samples.repeats import Repeats
from egeria.cache.share import Share
from egeria.cache.store.directory import CacheDirectory
from egeria.cache.store.rows import StoreError
from egeria.cache.teller import Teller
from egeria.cache.ways import WATCHED_FORWARDS, Call, Computed, Inference, StaleError, Undo, Watching, Way
from egeria.config import CacheConfig
from egeria.errors import UncacheableError
from egeria.events import CacheDecided
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.layers.skipping.refusals import check_runs_once

WHAT = "the activation cache"
REPORT_BATCHES = 500
"""Batches between two entries in the journal on how a generation does."""


class ActivationCache:
    """Makes the training forwards of a model with a frozen front.

    Behind a new boundary the forward pass is left as it is for a few iterations, whose pace is measured.
    Then activations are stored, or the front is run as inference, or nothing is done, until the boundary
    moves again. Whatever fails, the user's forward is made as it is, and what failed stays off.

    Args:
        model: the model in training.
        feed: knows the samples of batches; None where they cannot be told apart.
        directory: makes the place on the disk when one is needed.
        settings: of the cache.
        teller: where decisions go.
        spend: takes wall-clock and CPU seconds that were ours and not the user's.
        refusal: why there is no feed.
        share: with whom stores are shared.
    """

    def __init__(
        self,
        model: nn.Module,
        feed: SampleFeed | None,
        *,
        directory: Callable[[], CacheDirectory],
        settings: CacheConfig,
        teller: Teller,
        spend: Callable[[float, float], None],
        refusal: str = "",
        share: Share | None = None,
    ) -> None:
        self.num_forwards = 0
        """Training forwards so far."""
        self._model, self._feed = model, feed
        self._make_directory = directory
        self._directory: CacheDirectory | None = None
        self._settings = settings
        self._teller = teller
        self._spend = spend
        self._share = share or Share()
        self._repeats = Repeats()
        self._longest: int | None = None
        self._most_rows = 0
        self._modules: tuple[LayerModule, ...] = ()
        self._outlook = Outlook(steps_ahead=None)
        self._number = 0
        self._refusal = "cache.views is 0, so augmentation stays free" if settings.views == 0 else refusal
        self._way: Way = Computed()
        self._undo: Undo | None = None
        self._has_told_of_damage = False

    def move_boundary(self, modules: Sequence[LayerModule], outlook: Outlook) -> None:
        """Take note that other layer modules are frozen now; what is stored is of no use any more.

        Args:
            modules: the frozen layer modules, front to back; none after a thaw.
            outlook: the time to come.
        """
        self._modules, self._outlook, self._number = tuple(modules), outlook, self._share.number_at(self._number)
        self._take(self._watching() if modules else Computed())
        if not modules:
            if self._feed is not None:
                self._feed.use_views(None)
            if self._number:
                self._decided("computed", "nothing is frozen any more")

    def forward(self, call: Callable[[], Any], batch: Batch) -> Any:
        """Make a training forward.

        Args:
            call: the user's forward of the model.
            batch: its arguments.
        """
        self.num_forwards += 1
        watched = Call(call)
        try:
            drawn = self._drawn()
            self._observe(batch, drawn)
            if isinstance(self._way, Watching) and self._way.has_seen_enough(drawn is not None or self._feed is None):
                decide = partial(self._decide, batch, drawn, self._way)
                self._share.decide(self.place, self._number + 1, decide, lambda: isinstance(self._way, Generation))
            if isinstance(self._way, Generation) and (reason := self._way.why_it_does_not_pay()):
                self._compute(batch, reason, {})
            if self._undo is not None:
                self._undo.note()
            return self._way.forward(watched, batch, drawn)
        except Exception as error:
            if watched.was_plain:
                raise  # the user's own forward failed, with nothing of ours in it
            failure = error.with_traceback(None)  # its frames hold on to activations
        if watched.was_called and self._undo is not None:
            self._undo.undo()
        output = call()  # if that fails too it is not our fault, and nothing has to be given up
        self._fall_back(failure)
        return output

    def report(self) -> None:
        """Write into the journal how the present generation does."""
        if isinstance(self._way, Generation):
            self._teller.write(self._way.used(self._teller.step))

    def close(self) -> None:
        """Stop everything, give the loader back and delete what was stored; more than once is no error."""
        self._take(Computed())
        self._modules = ()
        if self._feed is not None:
            self._feed.close()
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    def _drawn(self) -> Drawn | None:
        """Return the samples of the batch that the loader handed out last; None if so few that other kernels run."""
        try:
            drawn = None if self._feed is None else self._feed.current
            num_rows = 0 if drawn is None else len(drawn.samples)
            self._most_rows = max(self._most_rows, num_rows)
            return drawn if num_rows >= min(LEAST_ROWS, self._most_rows) else None
        except NoSamplesError as error:
            self._teller.decline("storing activations", str(error))
            self._refusal = str(error)
            if self._feed is not None:
                self._feed.close()
            self._feed = None
            return None

    def _observe(self, batch: Batch, drawn: Drawn | None) -> None:
        """Learn what later decisions need: whether inputs repeat, and how long samples can be."""
        if type(self._way) is not Computed:
            check_runs_once()
        mask = batch.kwargs.get("attention_mask")
        if getattr(mask, "ndim", 0) == 2:
            self._longest = max(self._longest or 0, int(mask.shape[1]))  # type: ignore[union-attr]
        if drawn is not None and not drawn.viewed and self._repeats.wants(drawn.samples):
            self._repeats.observe(drawn.samples, fingerprints(batch.args, batch.kwargs, len(drawn.samples)))
        if isinstance(self._way, Generation):
            if self._way.use.batches % REPORT_BATCHES == REPORT_BATCHES - 1:
                self.report()
            self._tell_of_damage(self._way.num_damaged)

    def _tell_of_damage(self, num_damaged: int) -> None:
        """Warn of damaged rows when the first were found."""
        if num_damaged and not self._has_told_of_damage:
            self._has_told_of_damage = True
            reason = f"{num_damaged} of them were damaged, by the disk or another program; they are computed again"
            self._teller.fault("reading stored activations", StoreError(reason))

    def _decide(self, batch: Batch, drawn: Drawn | None, watched: Watching) -> None:
        """Choose how the forward pass is done from here on."""
        begin, begin_cpu = time.perf_counter(), time.process_time()
        self._number += 1
        reason = self._refusal or self._share.refusal(self._feed)
        numbers: dict[str, float] = {}
        if not reason and drawn is None:
            reason = "the loader given to attach does not hand out the batches that the model is called with"
            self._teller.decline(WHAT, reason)
        if not reason and drawn is not None:
            try:
                reason, numbers = self._try_to_store(batch, drawn, watched)
            except UncacheableError as error:
                reason = str(error)
                self._teller.decline(f"{WHAT} behind {self._modules[-1].name}", reason)
            except StoreError as error:
                reason = self._refusal = str(error)
                self._teller.decline(WHAT, reason)
        if reason:
            self._compute(batch, reason, numbers)
        self._spend(time.perf_counter() - begin, time.process_time() - begin_cpu)

    def _try_to_store(self, batch: Batch, drawn: Drawn, watched: Watching) -> tuple[str, dict[str, float]]:
        """Open a generation where it pays; return why not, or an empty reason, and the numbers that decided."""
        assert self._feed is not None
        what = (self._model, self._modules, self._feed, self._settings)
        sight = Sight(batch=batch, drawn=drawn, watched=watched, outlook=self._outlook, longest=self._longest)
        if self._share.leads:
            repeating = self._is_repeating()
            opening = open_generation(*what, sight=sight, place=self.place, number=self._number, repeating=repeating)
        else:
            opening = join_generation(*what, sight=sight, place=self.place(), number=self._number)
        if opening.generation is None:
            return opening.reason, opening.numbers
        self._take(opening.generation)
        self._decided("stored", opening.reason, opening.numbers)
        return "", opening.numbers

    def _is_repeating(self) -> bool:
        """Tell whether a sample comes with the same input each time; unless seen to, it does where views are set."""
        known = self._repeats.verdict
        return known is not False if self._settings.views is None else bool(known)

    def _compute(self, batch: Batch, reason: str, numbers: dict[str, float]) -> None:
        """Compute the frozen front, as inference where that gains something."""
        way = None
        if self._settings.inference and self._modules:
            try:
                way = Inference.build(self._model, self._modules, batch, compile=self._settings.compile)
            except Exception as error:
                self._teller.fault("folding the frozen layers", error)
        self._take(way or Computed())
        self._decided(self._way.mode, reason, numbers)

    def _fall_back(self, error: Exception) -> None:
        """Give up on the present way of doing the forward pass, and say why."""
        way, inputs_changed = self._way, isinstance(error, ChangedInputsError)
        self._take(Computed())
        if inputs_changed and self._can_still_fix_views():
            self._repeats.note_random()
            self._take(self._watching())
            self._decided("computed", f"{error}; in case they are augmented at random, that is fixed next")
            return
        if isinstance(error, (StaleError, StoreError, UncacheableError)):
            self._teller.decline(WHAT, str(error))
        else:
            self._teller.fault("skipping the frozen forward pass", error)
        if isinstance(way, (Generation, Watching)):
            self._refusal = f"it was turned off: {error}"
        self._decided("computed", str(error))

    def _can_still_fix_views(self) -> bool:
        """Tell whether random augmentation, not noticed before, may be why inputs have changed."""
        free = self._feed is not None and not self._feed.views_refusal and self._repeats.verdict is not False
        return free and self._settings.views is None

    def _watching(self) -> Watching:
        names = [name for module in self._modules for name in module.submodules]
        roots = [self._model.get_submodule(name) for name in names]
        return Watching(roots, 0 if self._settings.gate == "open" else WATCHED_FORWARDS)

    def _take(self, way: Way) -> None:
        self.report()
        self._way.close()
        self._way, self._has_told_of_damage = way, False
        self._undo = None if way.mode == Computed.mode else Undo(self._model)

    def place(self) -> CacheDirectory:
        """Return where stores go, made when it is first asked for. Raises `StoreError`."""
        self._directory = self._directory or self._make_directory()
        return self._directory

    def _decided(self, mode: str, reason: str, numbers: dict[str, float] | None = None) -> None:
        self._teller.write(
            CacheDecided(
                step=self._teller.step,
                boundary=self._modules[-1].name if self._modules else "",
                generation=self._number,
                mode=mode,
                reason=reason,
                numbers=numbers or {},
            )
        )
