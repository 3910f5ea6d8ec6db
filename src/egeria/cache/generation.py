"""`Generation`: the store of one boundary, and the passes made with it."""

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from egeria import tree
from egeria.cache.boundary import Boundary, Kind, Layout, Record, has_nan, require, signature
from egeria.cache.probe import difference, prove
from egeria.cache.rows import FileStore, Store, count_rows, row_keys, true_lengths, true_positions
from egeria.config import CacheConfig
from egeria.errors import brief
from egeria.events import CacheUsed
from egeria.journal import Recorder
from egeria.model.passes import KEPT, Batch, keeps_outside, living
from egeria.random_state import restoring_all

# So many batches after the end of an epoch, this share of the rows must have come again.
MORE_BATCHES, LEAST_REPEATS = 32, 0.05
UNKNOWN_EPOCH = 10_000  # batches of an epoch, if that is unknown
REVIEWED, COMPARED = 50, 8  # iterations, served and computed, that are compared
MOST_WAITS = 8  # passes to wait for one with a backward pass, and padding
CHECKED_ROWS = 2  # of a batch that is checked: changed weights change every row
PACKED = (
    "the model is called within a checkpoint, or other hooks on saved tensors, which may run it "
    "again in the backward pass; checkpoint its layers instead"
)
PROMPTED = "an input of the model needs a gradient: something in front of it is in training"
Call = Callable[[], Any]  # makes the user's pass


@dataclass(kw_only=True, slots=True)
class Found:
    """A batch that the model is called with, and what is known of it."""

    batch: Batch
    keys: list[bytes] = field(default_factory=list)  # of its rows; none before the proof
    lengths: list[int] | None = None  # of its rows, if they are cut
    known: list[int] = field(default_factory=list)  # indices of the rows that are stored
    kind: Kind | None = None
    value: Tensor | None = None  # what crosses, if the front can be skipped


@dataclass(eq=False)
class Generation:
    """The store of one boundary, and the passes made with it.

    A failure raises `UncacheableError`: the boundary is of no use from then on.
    """

    boundary: Boundary
    store: Store
    settings: CacheConfig
    recorder: Recorder
    num_batches: int | None  # of an epoch; None if unknown
    # Makes a context that handles such an error after a pass of the user's.
    guard: "Callable[[Generation], AbstractContextManager[None]]"

    def __post_init__(self) -> None:
        settings = self.settings
        self._epoch_batches = self.num_batches or UNKNOWN_EPOCH
        # At least one check in an epoch.
        self._check_every = max(1, min(settings.verify_batches, self._epoch_batches - 1))
        self._until_check, self._num_watched, self._largest_error = self._check_every, 0, 0.0
        self._layout: Layout | None = None  # from the proof of the boundary on
        self._watched: Record | None = None  # of the newest pass before the proof
        self._counts = Counter(hits=0, misses=0, repeats=0, batches=0, checks=0)
        # Rows since the last review, and how many of them were stored already.
        self._seen = self._seen_again = 0
        # Seconds from one pass to the next of the same kind. If nothing waits it is CPU time of
        # this thread, which leaves out other programs.
        self._served_s = deque[float](maxlen=0 if settings.gate == "open" else REVIEWED)
        self._computed_s = deque[float](maxlen=REVIEWED)
        waits = self.boundary.device.type != "cpu" or isinstance(self.store, FileStore)
        self._last, self._now = (False, 0.0), time.perf_counter if waits else time.thread_time

    def close(self, number: int) -> None:
        """Free the store, and journal under a number what it was used for."""
        self.boundary.close()
        self.store.close()
        used = CacheUsed(
            step=self.recorder.step,
            boundary=self.boundary.name,
            generation=number,
            size_bytes=self.store.size_bytes,
            largest_error=self._largest_error,
            damaged=self.store.damaged,
            **self._counts,
        )
        self.recorder.write(used)

    def look_up(self, batch: Batch) -> Found | None:
        """Return what is known of a batch; None if it is to be computed and not stored."""
        require(torch._C._autograd._top_saved_tensors_default_hooks(True) is None, PACKED)
        require(not tree.requires_grad(batch.arguments), PROMPTED)
        if not self._is_proven(batch):
            return Found(batch=batch)
        unreadable = tree.unreadable({"args": batch.args, "kwargs": batch.kwargs})
        require(not unreadable, f"the contents of {unreadable[1:]} cannot be read")
        assert self._layout is not None
        cut_names, is_whole = self._layout.cut_names, self.boundary.check()
        lengths = true_lengths(batch) if cut_names else None
        keys = row_keys(batch, lengths, cut_names)
        if not is_whole or keys is None or (cut_names and lengths is None):
            return None
        known = [index for index, key in enumerate(keys) if key in self.store]
        kind = self.boundary.kinds.get(signature(batch))
        found = Found(batch=batch, keys=keys, lengths=lengths, known=known, kind=kind)
        self._counts.update(batches=1, repeats=len(known))
        self._seen, self._seen_again = self._seen + len(keys), self._seen_again + len(known)
        self._review()
        if kind is not None and len(known) == len(keys) and self._until_check > 0:
            found.value = self._find_value(found, kind)
        return found

    def make_pass(self, call: Call, found: Found) -> Any:
        """Make a pass without the front if what crosses was found, else as it is."""
        is_served = found.value is not None
        now, (was_served, began) = self._now(), self._last
        self._last = is_served, now
        if began and was_served == is_served:
            (self._served_s if is_served else self._computed_s).append(now - began)
        if found.kind is not None and found.value is not None:
            return self._serve(call, found.kind, found.value)
        return self._fill(call, found) if found.keys else self._watch(call, found.batch)

    def _serve(self, call: Call, kind: Kind, value: Tensor) -> Any:
        restore = _keep_state(self.boundary.model)
        try:
            with self.boundary.replaying(kind, value):
                output = call()
            if not has_nan(output):
                return output
            failure = "the output of the model has NaN in it: it reads more of them than at first"
        except Exception as error:  # the plain pass raises the user's own errors again
            failure = brief(error)
        restore()
        output = call()
        with self.guard(self):
            # A NaN is the user's own if the plain pass gives one too.
            require(has_nan(output), f"without the frozen layers {failure}")
        return output

    def _fill(self, call: Call, found: Found) -> Any:
        """Make a pass with the front; store its new rows, and check some if that is due."""
        is_new = len(found.known) < len(found.keys) and not self.store.is_full
        if found.kind is not None and self._until_check > 0 and not is_new:
            self._counts["misses"] += len(found.keys)
            return call()
        try:
            record = self.boundary.record()
            output = call()
        finally:
            self.boundary.close()
        with self.guard(self):
            self._take_in(found, record)
        return output

    def _watch(self, call: Call, batch: Batch) -> Any:
        """Make a pass with the front, and note what it and its backward pass show."""
        before, record = living(), self.boundary.record()
        self._watched = record
        output = call()
        with self.guard(self):
            record.value = None
            record.await_backward(output, batch)
            require(not keeps_outside(self.boundary.model, output, before), KEPT)
        return output

    def _is_proven(self, batch: Batch) -> bool:
        """Prove the boundary once a pass has shown enough; return whether it is proven."""
        watched, self._watched = self._watched, None
        if watched is None:
            return self._layout is not None
        self.boundary.close()
        require(not watched.refusal, watched.refusal)
        has_lengths = true_lengths(batch) is not None
        was_padded = watched.true_positions is not None
        is_shown = watched.saw_backward and (was_padded or not has_lengths)
        is_fit = count_rows(batch) > 1 and not (has_lengths and true_positions(batch) is None)
        self._num_watched += 1
        if not (is_shown and is_fit) and self._num_watched <= MOST_WAITS:
            return False
        ignores_padding = is_shown and was_padded and not watched.reads_padding
        self._layout = prove(self.boundary, batch, ignores_padding)
        return True

    def _find_value(self, found: Found, kind: Kind) -> Tensor | None:
        """Return what crosses for a batch that is stored; None if a row does not fit."""
        assert self._layout is not None
        rows = self.store.read(found.keys)
        if self.store.damaged:
            self.recorder.decline("serving stored rows that are damaged", "they are computed again")
        whole = [row for row in rows if row is not None]
        found.known = [index for index, row in enumerate(rows) if row is not None]
        if len(whole) < len(rows):
            return None
        value = self._layout.join(whole, kind, self.boundary.device)
        if value is not None:
            self._counts["hits"] += len(rows)
            self._until_check -= 1
        return value

    def _take_in(self, found: Found, record: Record) -> None:
        """Store the new rows of a pass, and check some known ones if that is due."""
        layout, store = self._layout, self.store
        assert layout is not None
        rows = layout.split(self.boundary.learn(found.batch, record)[1], found.lengths)
        self._counts["misses"] += len(rows)
        if self._until_check <= 0 and found.known:
            self._check(found, rows, layout.limit)
        new = [index for index in range(len(rows)) if index not in found.known]
        if not new or store.is_full:
            return
        store.write([found.keys[index] for index in new], [rows[index] for index in new])
        if store.is_full:
            require(store.size_bytes > 0, store.error or "not one batch fits into what may be used")
            if store.error:
                self.recorder.decline("storing more activations", store.error)

    def _check(self, found: Found, rows: Sequence[Tensor], limit: float) -> None:
        """Raise UncacheableError if a few stored rows differ from what the front gives now."""
        chosen = found.known[:CHECKED_ROWS]
        stored = self.store.read([found.keys[index] for index in chosen])
        pairs = [(row, rows[i]) for i, row in zip(chosen, stored, strict=True) if row is not None]
        error = max((difference(*pair) for pair in pairs), default=0.0)
        self._counts["checks"] += 1
        self._until_check, self._largest_error = self._check_every, max(self._largest_error, error)
        require(
            error <= limit,
            f"stored activations differ from computed ones by {error:.1e}, more than {limit:.1e}: "
            "the frozen layers give something else now",
        )

    def _review(self) -> None:
        """Raise UncacheableError if storing does not pay."""
        if not self._counts["batches"] % (self._epoch_batches + MORE_BATCHES):
            require(
                self._seen_again >= LEAST_REPEATS * self._seen,
                f"inputs do not come again: of the last {self._seen} samples {self._seen_again} "
                "had been there before",
            )
            require(
                self._counts["hits"] > 0 or not self.store.is_full,
                "what may be used holds too few samples: no batch came of which it had all",
            )
            self._seen = self._seen_again = 0
        if len(self._served_s) < REVIEWED or len(self._computed_s) < COMPARED:
            return
        served_s, computed_s = map(statistics.median, (self._served_s, self._computed_s))
        require(
            served_s < computed_s,
            f"an iteration with stored activations takes {1e3 * served_s:.1f} ms, and "
            f"{1e3 * computed_s:.1f} ms with computed ones",
        )
        self._served_s.clear()


def _keep_state(model: nn.Module) -> Call:
    """Return what takes back what a pass changes: random states, and buffers of active layers."""
    restores = restoring_all(model)
    tables: Any = [module._buffers for module in model.modules() if module.training]
    entries = [(table, name, entry) for table in tables for name, entry in table.items()]
    buffers = [(*entry, entry[-1].detach().clone()) for entry in entries if entry[-1] is not None]

    def restore() -> None:
        for restore_random_state in restores:
            restore_random_state()
        for table, name, buffer, before in buffers:
            table[name] = buffer
            buffer.data.copy_(before)

    return restore
