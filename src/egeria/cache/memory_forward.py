"""`MemoryForward`: training forwards that are served from memory where the input was there before,
and fill it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from egeria import tree
from egeria.cache.decision import Outlook
from egeria.cache.forward_modes import Rollback, StaleError, Unchanged, UserForward
from egeria.cache.gate import Prospects
from egeria.cache.generation import LEAST_ROWS, Use, take_rows
from egeria.cache.samples import BatchIndices
from egeria.cache.store.memory import RowMemory, row_keys
from egeria.cache.store.rows import Integers, Mask
from egeria.errors import without_frames
from egeria.events import CacheUsed
from egeria.layers.batch import Batch
from egeria.skipping.crossing import check_runs_once
from egeria.skipping.prefix import Prefix
from egeria.skipping.probe import tolerance
from egeria.skipping.rows import true_lengths

LEAST_POSITIONS = 128
"""Positions of sequences that are computed together at least, where only some samples of a batch
are missing. With half as many MiniLM came to the same last bits as with all, in float32 and
bfloat16 (record 0041, one processor)."""
REPEATED_BATCHES = 8
"""Batches that must have come again, of 32 more than an epoch has, or inputs are taken to be
random."""
WINDOW_BATCHES = 32
"""Batches between two looks at how many samples were found."""
LEAST_SHARE = 0.05
"""Share of the samples that must be found from the third epoch on, or looking for them is given
up."""
UNKNOWN_ITERATIONS = 50
UNKNOWN_SHARE = 0.01
"""Iterations whose time filling may take where nobody knows how long an epoch is, or the run: so
many, or this share of those ahead."""
HARMLESS = 8
"""Passes before which an attribute around the frozen layers was set otherwise, and stored rows were
right all the same, after which that is no reason to check them: it may be a counter of steps."""

SERVED_SHARE = 0.9
"""Share of the samples of a window that must be known, or it says nothing of what serving
brings."""


@dataclass(slots=True)
class Review:
    """Whether storing pays in fact: how long iterations take, beside those before it, in windows of
    some batches.

    Where nearly all samples of a window were known an iteration must be shorter. In others it may
    be longer, by no more than the epochs ahead will win back, until most samples must be known, nor
    by more than `budget_s` in all. Two windows in a row that fail end it: one may be a busy
    machine.
    """

    prospects: Prospects
    """What it was to bring and cost."""
    served_from: float
    """Batches after which each window must be of shorter iterations; infinite where nobody
    knows."""
    budget_s: float
    """Seconds that filling may take in all, less what was saved meanwhile."""
    _spent_s: float = 0.0
    _num_batches: int = 0
    _last: float | None = None
    _durations: list[float] = field(default_factory=list)
    _known: list[bool] = field(default_factory=list)
    """Of the samples of the window."""
    _is_warned: bool = False

    @classmethod
    def of(cls, prospects: Prospects, num_batches: int | None, outlook: Outlook) -> Review:
        """Return what asks again.

        Where each sample may come to another process in each epoch they get known one by one.
        Filling may take what the epochs ahead win back; where nobody knows how long an epoch is, or
        the run, a share of the time ahead.

        Args:
            prospects: what storing was to bring and cost.
            num_batches: of an epoch; None where nobody knows.
            outlook: the time to come.
        """
        served_from = (
            math.inf if num_batches is None or outlook.num_hosts > 1 else 2.0 * num_batches
        )
        if num_batches is None or outlook.steps_ahead is None:
            ahead = (
                0.0
                if outlook.steps_ahead is None
                else outlook.steps_ahead * outlook.forwards_per_step
            )
            budget_s = max(UNKNOWN_ITERATIONS, UNKNOWN_SHARE * ahead) * prospects.iteration_s
        else:
            budget_s = num_batches * replace(prospects, fill_s=0.0).total_gain_s
        return cls(prospects, served_from, budget_s)

    def note(self, known: Mask) -> None:
        """Note a forward that begins, and which of its samples are known [B]."""
        now = time.perf_counter()
        if self._last is not None:
            self._durations.append(now - self._last)
        self._last, self._num_batches = now, self._num_batches + 1
        self._known += known.tolist()

    def note_cost(self, seconds: float) -> None:
        """Note what trying out a kind of batch took, which the median of
        iterations does not show.
        """
        self._spent_s += seconds

    def complaint(self) -> str:
        """Return, once in two windows at the most, that it does not pay; empty where it does."""
        if len(self._durations) < WINDOW_BATCHES:
            return ""
        found_s, known_share = statistics.median(self._durations), statistics.fmean(self._known)
        self._durations, self._known = [], []
        usual_s, allowed_s, why = self.prospects.iteration_s, 0.0, ""
        self._spent_s += WINDOW_BATCHES * (found_s - usual_s)
        if known_share < SERVED_SHARE and self._num_batches <= self.served_from:
            allowed_s = replace(self.prospects, fill_s=0.0).total_gain_s
            why = ", more than the epochs ahead would win back"
        is_longer = found_s - usual_s >= allowed_s
        was_warned, self._is_warned = self._is_warned, is_longer or self._spent_s >= self.budget_s
        if not (was_warned and self._is_warned):
            return ""
        if not is_longer:
            return (
                f"filling took {self._spent_s:.1f} s so far, more than the {self.budget_s:.1f} "
                "s that it may"
            )
        return (
            f"an iteration in which {known_share:.0%} of the samples were stored before takes "
            f"{1e3 * found_s:.1f} ms, "
            f"and took {1e3 * usual_s:.1f} ms with computed ones{why}"
        )


@dataclass(kw_only=True, eq=False)
class MemoryForward:
    """Serves training forwards from memory, and fills it."""

    prefix: Prefix
    """The frozen front."""
    memory: RowMemory
    """Freed with this."""
    number: int
    """Of the generation."""
    boundary: str
    verify_batches: int
    """Batches from memory between two checks."""
    rollback: Rollback
    epoch_batches: int
    """Batches in which every sample should have come again."""
    expected_share: float
    """Share of the samples that should be found from then on, if inputs come again."""
    least_rows: int
    """Smaller batches are left alone: other kernels run, to other last bits."""
    review: Review | None
    """Asks again if this pays; None where that is not asked."""

    def __post_init__(self) -> None:
        self.use = Use()
        self._device = next(self.prefix.model.parameters()).device
        self._front = Unchanged(self.prefix)
        self._failure: Exception | None = None
        self._until_check = 0
        self._is_set_otherwise = False
        """Whether an attribute around the frozen layers was, before this pass."""
        self._num_agreed = 0
        """Checks for that in which nothing differed."""
        self._windows = deque([(0, 0)], maxlen=2 + math.ceil(self.epoch_batches / WINDOW_BATCHES))

    def forward(self, call: UserForward, batch: Batch, _: BatchIndices | None = None) -> Any:
        """Make a training forward: replayed where all samples, or most, are known; else computed
        and recorded.

        Args:
            call: the user's forward of the model.
            batch: its arguments.

        Raises:
            EgeriaError: nothing stored can be used any more. What the call itself raises passes
                through.
        """
        self._check()
        if self._num_agreed < HARMLESS:
            self._is_set_otherwise = self.prefix.is_set_otherwise_around()
            self._until_check = 0 if self._is_set_otherwise else self._until_check
        num_rows = count_rows(batch)
        lengths = true_lengths(batch.kwargs, num_rows) if self.memory.has_length else None
        keys = (
            row_keys(batch, num_rows, self.prefix.shared_arguments)
            if num_rows >= self.least_rows
            else None
        )
        if keys is None or (lengths is None and self.memory.has_length):
            return call(plain=True)
        self.use.batches += 1
        known = self.memory.knows(keys)
        if self.review is not None:
            self.review.note(known)
        is_served = (
            bool(known.any())
            and (bool(known.all()) or self.prefix.can_split)
            and self.prefix.knows(batch)
        )
        rows = self._rows(batch, keys, known, lengths) if is_served else None
        if rows is None:
            return self._record(call, batch, keys, lengths)
        self.use.hits += int(known.sum())
        self.use.misses += int((~known).sum())
        self.rollback.save()
        output = call.replayed(self.prefix.replaying(rows, batch))
        self.rollback.forget()
        return output

    def complaint(self) -> str:
        """Return that it saves no time; empty where that is not seen."""
        return "" if self.review is None else self.review.complaint()

    def used(self, step: int) -> CacheUsed:
        """Return what it did so far, for the journal."""
        use = self.use
        return CacheUsed(
            step=step,
            boundary=self.boundary,
            generation=self.number,
            hits=use.hits,
            misses=use.misses,
            mismatches=0,
            batches=use.batches,
            stalls=0,
            stall_s=0.0,
            bytes_read=0,
            bytes_written=0,
            size_bytes=self.memory.size_bytes,
            dropped_writes=0,
            checks=use.checks,
            largest_error=use.largest_error,
            thread_cpu_s=0.0,
        )

    def close(self) -> None:
        """Free the memory; more than once is no error."""
        self.memory.close()

    def _rows(
        self, batch: Batch, keys: Sequence[bytes], known: Mask, lengths: Integers | None
    ) -> list[Tensor] | None:
        """Return what crosses for a batch, computed where it is not known; None where it does not
        fit.

        Where a check is due the whole batch is computed, and what is known compared.
        """
        padded_length = None if lengths is None else int(batch.kwargs["attention_mask"].shape[1])
        rows = self.memory.read(keys, known, padded_length)
        if not self.prefix.fits(batch, rows):
            return None
        missing, whole = np.flatnonzero(~known), None
        if self._until_check <= 0:
            whole = self.prefix.compute(batch)
            self._check_rows(batch, whole, rows, known, lengths)
        self._until_check -= 1
        if len(missing):
            found = self._compute(batch, missing) if whole is None else take_rows(whole, missing)
            for leaf, own in zip(rows, found, strict=True):
                leaf[torch.from_numpy(missing)] = own.to(leaf.device)
            own_lengths = None if lengths is None else lengths[missing]
            self.memory.write([keys[row] for row in missing.tolist()], found, own_lengths)
        return rows

    def _compute(self, batch: Batch, missing: Integers) -> list[Tensor]:
        """Return some rows [b] of a batch, computed together with repeats of them where they are
        few.
        """
        mask = batch.kwargs.get("attention_mask")
        length = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else 1
        least = min(LEAST_ROWS, -(-LEAST_POSITIONS // max(1, length)))
        together = np.resize(missing, max(len(missing), min(count_rows(batch), least)))
        return [
            leaf[: len(missing)] for leaf in self.prefix.compute(batch, torch.from_numpy(together))
        ]

    def _record(
        self, call: UserForward, batch: Batch, keys: Sequence[bytes], lengths: Integers | None
    ) -> Any:
        """Let the user's forward run as it is, and store what it computed."""
        self.use.misses += len(keys)
        if self.memory.is_full and self.prefix.knows(batch):
            return call(plain=True)
        if self.prefix.is_to_be_tried(
            batch
        ):  # now, while no graph of the user's waits for its backward pass
            begin = time.perf_counter()
            self.prefix.learn(batch)
            if self.review is not None:
                self.review.note_cost(time.perf_counter() - begin)
        with self.prefix.recording() as trial:
            output = call(plain=True)
        try:
            rows = self.prefix.recorded(trial)
            if not self.prefix.knows(batch):
                self.prefix.learn_from(trial, batch)
            new = np.flatnonzero(~self.memory.knows(keys))
            if len(new) and self.prefix.fits(batch, rows):
                rows = rows if len(new) == len(keys) else take_rows(rows, new)
                self.memory.write(
                    [keys[row] for row in new.tolist()],
                    rows,
                    None if lengths is None else lengths[new],
                )
        except (
            Exception
        ) as error:  # the forward is done and right; the next one will not be recorded
            self._failure = without_frames(error)
        return output

    def lack_of_hits(self) -> str:
        """Return, each time that so many batches were seen, that too few samples have come again;
        empty if enough did.

        Where the first pass over the data began in the middle of an epoch, some 32 batches have
        come again when 32 more than an epoch has were seen.
        """
        seen = self.use.batches
        if not seen or seen % WINDOW_BATCHES:
            return ""
        self._windows.append((self.use.hits, self.use.hits + self.use.misses))
        if seen < self.epoch_batches + WINDOW_BATCHES:
            return ""
        (hits_before, rows_before), (hits, rows) = self._windows[0], self._windows[-1]
        found, looked_up = hits - hits_before, rows - rows_before
        needed = REPEATED_BATCHES * looked_up / (WINDOW_BATCHES * (len(self._windows) - 1))
        if seen >= 2 * self.epoch_batches + WINDOW_BATCHES:
            needed = max(needed, LEAST_SHARE * looked_up)
        if found >= needed * self.expected_share:
            return ""
        return (
            f"inputs do not come again: of the last {looked_up} samples {found} had been there "
            "before"
        )

    def _check_rows(
        self,
        batch: Batch,
        computed: Sequence[Tensor],
        rows: Sequence[Tensor],
        known: Mask,
        lengths: Integers | None,
    ) -> None:
        """Compare the rows [B, ...] that came from memory with computed ones."""
        self._until_check, some = self.verify_batches, np.flatnonzero(known)
        own, stored = (take_rows(side, some) for side in (computed, rows))
        error = self.prefix.error(own, stored, None if lengths is None else lengths[some].tolist())
        self.use.checks += 1
        self.use.largest_error = max(self.use.largest_error, error)
        limit = tolerance(batch, self._device)
        if not error <= limit:
            raise StaleError(
                f"stored activations differ from computed ones by {error:.1e}, more than "
                f"{limit:.1e}"
            )
        self._num_agreed += self._is_set_otherwise

    def _check(self) -> None:
        """Raise what has failed behind a recorded forward, or what has changed
        since the last one.
        """
        if self._failure is not None:
            raise self._failure
        check_runs_once()
        self._front.check()


def count_rows(batch: Batch) -> int:
    """Return the number of samples: the first axis of the first tensor that has
    one; 0 without any.
    """
    return next((tensor.shape[0] for tensor in tree.leaves(batch.arguments) if tensor.dim()), 0)
