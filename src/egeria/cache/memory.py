"""`MemoryCache`: skips the frozen front where inputs come again just as they were, with nothing but
memory.

Rows are known by the content of the input (`store/memory.py`). So neither the loader nor the
numbers of samples take part, and nothing is drawn ahead or read ahead. Before a layer module is
frozen a look at some batches of two epochs tells how many samples come again (`repeats.py`). Where
a freeze comes too early for that, random augmentation shows in that nothing does, and ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from egeria.cache.decision import Outlook
from egeria.cache.forward_modes import (
    WATCHED_FORWARDS,
    PlainForward,
    Rollback,
    TimedForward,
    UserForward,
    is_users_own,
)
from egeria.cache.gate import Prospects, judge, size_text
from egeria.cache.generation import LEAST_ROWS
from egeria.cache.memory_forward import WINDOW_BATCHES, MemoryForward, Review, count_rows
from egeria.cache.repeats import RepeatedContents
from egeria.cache.store.memory import RowMemory, free_memory_bytes, row_keys
from egeria.config import CacheConfig
from egeria.errors import EgeriaError, UncacheableError, without_frames
from egeria.events import CacheDecided
from egeria.journal import Recorder
from egeria.layers.batch import Batch
from egeria.layers.modules import LayerModule
from egeria.skipping.crossing import check_runs_once
from egeria.skipping.prefix import Prefix
from egeria.skipping.rows import true_lengths

HANDLING_S = 3e-4
"""What a batch from memory takes besides hashing and copying: stubs, and the look at the frozen
weights (measured)."""
TRIAL_ITERATIONS = 20
"""Iterations whose time finding out what crosses takes, and that must be won back."""
MOST_UNPADDED = 32
"""Batches of sequences without any padding that are let pass for one with some."""
LEAST_EPOCHS = 1.2
"""Epochs that must be ahead: the first one fills."""
REPORT_BATCHES = 500
"""Batches between two entries in the journal on how a generation does."""
UNKNOWN_EPOCH = 10_000
"""Batches after which inputs must have come again where nobody knows how long an epoch is."""
TRIED_AGAIN = 2
"""Times as many steps as were made when inputs turned out not to come again, or storing not to pay,
after which it is tried again: an augmentation may be switched off for the last epochs, but most
never are, and each try costs."""
LEAST_REPEATED = 0.05
"""Share of the samples that must come again."""
SETTLED = 0.8
"""Of the time that iterations took when they were watched before: where they still get shorter by
more, they wait for something that passes, such as kernels that an accelerator loads, or plans that
it makes for each new length."""
MOST_WATCHES = 6
"""Times that the iterations behind a freeze are watched for that to end."""
WATCHES_PER_EPOCH = 16
"""Part of an epoch whose iterations are timed at once, eight of them at least, and at most as many
as the review looks at, which holds its own against them. Of sentences of all lengths the median of
eight was a fifth under that of all."""


@dataclass(kw_only=True, eq=False, slots=True)
class MemoryCache:
    """Makes the training forwards of a model with a frozen front, as `ActivationCache` does, out of
    memory alone.

    Whatever fails, the user's forward is made as it is; what is declined is written to the journal,
    without a warning.
    """

    model: nn.Module
    settings: CacheConfig
    recorder: Recorder
    spend: Callable[[float, float], None]
    """Takes wall-clock and CPU seconds that were ours and not the user's."""
    num_batches: int | None
    """Of an epoch, for this process; None where nobody knows."""
    find_refusal: Callable[[], str]
    """Returns why the forward pass of this model is not skipped; empty where it may be."""
    num_local: int = 1
    """Processes of this host that store in its memory, of whose share each has an equal part."""
    refusal: str = ""
    """Why nothing is stored any more."""
    mode: PlainForward | MemoryForward = field(default_factory=PlainForward)
    """How they are made now."""
    _modules: tuple[LayerModule, ...] = ()
    _outlook: Outlook = field(default_factory=partial(Outlook, steps_ahead=None))
    _number: int = 0
    _most_rows: int = 0
    _patience: int = MOST_UNPADDED
    repeats: RepeatedContents | None = field(init=False)
    """Watches which inputs come again; None where that is not asked, or known."""
    _repeated_share: float | None = None
    """Of the samples; None where that is not known."""
    _given_up: tuple[int, str] = (0, "")
    """Until which step storing is taken not to pay, and why."""
    _watched_s: list[float] = field(default_factory=list)
    """How long iterations took, each time that they were watched behind this boundary."""

    def __post_init__(self) -> None:
        """Watch where a share of the samples can be found."""
        is_asked = self.settings.gate != "open" and self.num_batches is not None
        self.repeats = RepeatedContents(self.num_batches or 1) if is_asked else None

    @property
    def is_watching(self) -> bool:
        """Whether batches are still to be looked at for inputs that come again."""
        return self.repeats is not None and not self.repeats.is_over

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
        was_stored = isinstance(self.mode, MemoryForward)
        self._modules, self._outlook = tuple(modules), outlook
        self._switch_to(PlainForward())
        if not modules:
            if was_stored:
                self._record("computed", "nothing is frozen any more")
            return
        self._number += 1
        self._watched_s = []
        reason = (
            self.refusal
            or self.find_refusal()
            or self._foresee()
            or self._ask_repeats()
            or self._recall()
        )
        if reason:
            self._record("computed", reason)
            return
        self._switch_to(self._timed_forward())

    def observe(self, batch: Batch) -> None:
        """Look at a batch for inputs that come again; a failure ends that."""
        if self.repeats is None:
            return
        begin, begin_cpu = time.perf_counter(), time.process_time()
        try:
            self.repeats.observe(batch, count_rows(batch))
        except Exception as error:
            self.repeats = None
            self.recorder.fault("looking for inputs that come again", error)
        self.spend(time.perf_counter() - begin, time.process_time() - begin_cpu)

    def forward(self, call: Callable[[], Any], batch: Batch) -> Any:
        """Make a training forward.

        Args:
            call: the user's forward of the model.
            batch: its arguments.
        """
        user_forward, mode = UserForward(call), self.mode
        try:
            if isinstance(mode, TimedForward) and mode.has_seen_enough(True):
                self._decide(batch, mode)
            elif isinstance(mode, MemoryForward):
                self._review(mode)
            return self.mode.forward(user_forward, batch, None)
        except Exception as error:
            if user_forward.was_plain:
                raise  # the user's own forward failed, with nothing of ours in it
            failure = without_frames(error)
        if user_forward.was_called and isinstance(self.mode, MemoryForward):
            self.mode.rollback.restore()
        output = call()  # if that fails too it is not our fault, and nothing has to be given up
        if is_users_own(failure, output):
            return output
        if not isinstance(failure, EgeriaError):
            self.recorder.fault("skipping the frozen forward pass", failure)
            self.refusal = f"it was turned off: {failure}"
        self._compute(str(failure), {})
        return output

    def refuse(self, reason: str) -> None:
        """Store nothing any more, for a reason that the journal gets where something is frozen."""
        self.refusal, self.repeats = reason, None
        if not self.is_idle:
            self._compute(reason, {})

    def report(self) -> None:
        """Write into the journal how the present generation does."""
        if isinstance(self.mode, MemoryForward):
            self.recorder.write(self.mode.used(self.recorder.step))

    def close(self) -> None:
        """Stop everything and free what was stored; more than once is no error."""
        self._switch_to(PlainForward())
        self._modules = ()

    def _review(self, mode: MemoryForward) -> None:
        if mode.use.batches % REPORT_BATCHES == REPORT_BATCHES - 1:
            self.report()
        if reason := mode.lack_of_hits():
            self._give_up(reason)
        elif (reason := mode.complaint()) and self._repeated_share is None:
            self._give_up(reason)  # else it may pay behind the next freeze, which is deeper
        if reason:
            self._compute(reason, {})

    def _give_up(self, reason: str) -> None:
        step = self.recorder.step
        self._given_up = TRIED_AGAIN * step, f"{reason}, at step {step}"

    def _ask_repeats(self) -> str:
        """Return that inputs do not come again, as far as that was watched; empty where they do or
        nobody knows.
        """
        found = self.repeats.share(self._outlook.num_hosts) if self.repeats is not None else None
        if found is None:
            return ""
        self.repeats, (share, words) = None, found
        if share >= LEAST_REPEATED:
            self._repeated_share = share
            return ""
        reason = f"inputs do not come again: {words}"
        self._give_up(reason)
        return reason

    def _recall(self) -> str:
        """Return why storing is not worth another try yet."""
        until, reason = self._given_up
        if self.recorder.step >= until:
            return ""
        return f"{reason}; that is tried again from step {until} on"

    def _foresee(self) -> str:
        """Return why storing cannot pay, as far as that is known before anything is measured."""
        epochs = self._outlook.epochs(self.num_batches)
        if self.settings.gate == "open" or epochs >= LEAST_EPOCHS:
            return ""
        return (
            f"the boundary may move or the run end within {epochs:.1f} epochs, "
            f"and storing takes at least {LEAST_EPOCHS:g} to pay"
        )

    def _decide(self, batch: Batch, timed: TimedForward) -> None:
        """Choose how the forward pass is done from here on; waits for a batch that shows what
        padding does.
        """
        num_rows = count_rows(batch)
        self._most_rows = max(self._most_rows, num_rows)
        if num_rows < min(LEAST_ROWS, self._most_rows):
            return
        lengths = true_lengths(batch.kwargs, num_rows)
        if (
            lengths is not None
            and lengths.min() == batch.kwargs["attention_mask"].shape[1]
            and self._patience > 0
        ):
            self._patience -= 1
            return
        begin, begin_cpu = time.perf_counter(), time.process_time()
        numbers: dict[str, float] = {}
        if not self._is_settled(timed):
            self._switch_to(self._timed_forward())
            return
        try:
            check_runs_once()
            reason, numbers = self._try_to_store(batch, num_rows, timed)
        except UncacheableError as error:
            reason = str(error)
        if reason:
            self._compute(reason, numbers)
        self.spend(time.perf_counter() - begin, time.process_time() - begin_cpu)

    def _timed_forward(self) -> TimedForward:
        watched = max(
            WATCHED_FORWARDS, min(WINDOW_BATCHES, (self.num_batches or 0) // WATCHES_PER_EPOCH)
        )
        return TimedForward.of(self.model, self._modules, self.settings.gate, watched)

    def _is_settled(self, timed: TimedForward) -> bool:
        """Return whether iterations are no longer much shorter than when they
        were watched before.
        """
        before, self._watched_s = self._watched_s, [*self._watched_s, timed.iteration_s]
        if self.settings.gate == "open" or len(self._watched_s) >= MOST_WATCHES:
            return True
        return bool(before) and timed.iteration_s >= SETTLED * before[-1]

    def _try_to_store(
        self, batch: Batch, num_rows: int, timed: TimedForward
    ) -> tuple[str, dict[str, float]]:
        """Store from here on where it pays; return why not, or an empty reason, and the numbers
        that decided.
        """
        begin = time.perf_counter()
        keys = row_keys(batch, num_rows)
        hash_s = time.perf_counter() - begin
        if keys is None:
            return "the input of the model cannot be told apart by sample", {}
        prospects = Prospects(
            iteration_s=timed.iteration_s,
            prefix_s=timed.prefix_s,
            serve_s=hash_s + HANDLING_S,
            fill_s=hash_s,
            repeated_share=1.0 if self._repeated_share is None else self._repeated_share,
            epochs_ahead=self._outlook.epochs(self.num_batches),
        )
        if reason := self._ask_gate(prospects):
            return reason, prospects.to_dict()
        prefix = Prefix.find(self.model, self._modules, batch, num_rows)
        rows = prefix.compute(batch, None)
        memory = RowMemory([leaf.length_axis for leaf in prefix.row_leaves], self._limit_bytes)
        prospects = _time_memory(
            prospects, memory, batch, rows, (self.num_batches or 1) * self._outlook.num_hosts
        )
        if reason := self._ask_gate(prospects):
            return reason, prospects.to_dict()
        self._switch_to(self._memory_forward(prefix, memory, prospects))
        self._record("stored", self._gain(prospects), prospects.to_dict())
        return "", prospects.to_dict()

    def _limit_bytes(self, stored_bytes: int) -> int:
        """Return how much may be stored here, where all processes of this host have stored as much
        as this one.
        """
        free_bytes = free_memory_bytes() + self.num_local * stored_bytes
        return int(free_bytes * self.settings.memory_share / self.num_local)

    def _memory_forward(
        self, prefix: Prefix, memory: RowMemory, prospects: Prospects
    ) -> MemoryForward:
        return MemoryForward(
            prefix=prefix,
            memory=memory,
            number=self._number,
            boundary=self._modules[-1].name,
            verify_batches=self.settings.verify_batches,
            rollback=Rollback(self.model),
            epoch_batches=self.num_batches or UNKNOWN_EPOCH,
            expected_share=prospects.stored_share
            * prospects.repeated_share
            / self._outlook.num_hosts,
            least_rows=min(LEAST_ROWS, self._most_rows),
            review=None
            if self.settings.gate == "open"
            else Review.of(prospects, self.num_batches, self._outlook),
        )

    def _ask_gate(self, prospects: Prospects) -> str:
        """Return why storing does not pay; empty where it does."""
        if self.settings.gate == "open":
            return ""
        pays, reason = judge(prospects, minimum_epochs=LEAST_EPOCHS, is_in_memory=True)
        if pays and self.num_batches:
            trial_s = TRIAL_ITERATIONS * prospects.iteration_s
            if prospects.total_gain_s * self.num_batches < trial_s:
                return (
                    "finding out how to skip the frozen layers takes longer than the epochs "
                    "ahead would save"
                )
        return "" if pays else reason

    def _gain(self, prospects: Prospects) -> str:
        if self.settings.gate == "open":
            return "cache.gate is 'open'"
        share = prospects.gain_s / prospects.iteration_s
        return (
            f"a batch from memory saves {share:.0%} of an iteration; "
            f"{size_text(prospects.room_bytes)} may be used"
        )

    def _compute(self, reason: str, numbers: dict[str, float]) -> None:
        """Compute the frozen front until the boundary moves."""
        self._switch_to(PlainForward())
        self._record("computed", reason, numbers)

    def _switch_to(self, mode: PlainForward | MemoryForward) -> None:
        self.report()
        self.mode.close()
        self.mode = mode

    def _record(self, mode: str, reason: str, numbers: dict[str, float] | None = None) -> None:
        boundary = self._modules[-1].name if self._modules else ""
        self.recorder.write(
            CacheDecided(
                step=self.recorder.step,
                boundary=boundary,
                generation=self._number,
                mode=mode,
                reason=reason,
                numbers=numbers or {},
            )
        )


def _time_memory(
    prospects: Prospects, memory: RowMemory, batch: Batch, rows: Sequence[Tensor], num_batches: int
) -> Prospects:
    """Write a batch into memory and read it back; add what that takes, and leave the memory empty.

    `num_batches` come to this process until all samples are known.
    """
    rows[0].flatten()[
        :1
    ].cpu()  # so that an accelerator's queue is empty, and only what follows is timed
    keys = [str(row).encode() for row in range(len(rows[0]))]
    lengths = true_lengths(batch.kwargs, len(keys)) if memory.has_length else None
    begin = time.perf_counter()
    memory.write(keys, rows, lengths)
    written = time.perf_counter()
    batch_bytes, room_bytes = memory.size_bytes, memory.limit_bytes
    if memory.is_full:
        return replace(
            prospects,
            batch_bytes=room_bytes + 1,
            needed_bytes=room_bytes * 100,
            room_bytes=room_bytes,
        )
    padded_length = None if lengths is None else int(batch.kwargs["attention_mask"].shape[1])
    for leaf, own in zip(memory.read(keys, memory.knows(keys), padded_length), rows, strict=True):
        torch.empty_like(own).copy_(leaf)
    read_s = time.perf_counter() - written
    memory.close()
    return replace(
        prospects,
        serve_s=prospects.serve_s + read_s,
        fill_s=prospects.fill_s + written - begin,
        batch_bytes=batch_bytes,
        needed_bytes=batch_bytes * num_batches,
        room_bytes=room_bytes,
    )
