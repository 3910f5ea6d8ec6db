"""`MemoryCache`: skips the frozen front where inputs come again just as they were, with nothing but
memory.

Rows are known by the content of the input (`store/memory.py`). So neither the loader nor the
numbers of samples take part, and nothing is drawn ahead or read ahead. Random augmentation shows in
that nothing comes again, and ends it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from egeria.cache.base import Cache, Opening
from egeria.cache.forward_modes import PaybackCheck, TimedForward
from egeria.cache.gate import Prospects, judge, size_text
from egeria.cache.memory_forward import MemoryForward, count_rows
from egeria.cache.samples import BatchIndices
from egeria.cache.store.memory import RowMemory, free_memory_bytes, row_keys
from egeria.errors import UncacheableError
from egeria.model.batch import Batch
from egeria.skipping.prefix import Prefix
from egeria.skipping.rows import true_lengths

HANDLING_S = 3e-4
"""What a batch from memory takes besides hashing and copying: stubs, and the look at the frozen
weights (measured)."""
TRIAL_ITERATIONS = 20
"""Iterations whose time finding out what crosses takes, and that must be won back."""
UNKNOWN_EPOCH = 10_000
"""Batches after which inputs must have come again where nobody knows how long an epoch is."""


@dataclass(kw_only=True, eq=False)
class MemoryCache(Cache):
    """Makes the training forwards of a model with a frozen front, out of memory alone.

    Nobody asked for it: what is declined is written to the journal, without a warning.
    """

    num_batches: int | None
    """Of an epoch, for this process; None where nobody knows."""
    num_local: int = 1
    """Processes of this host that store in its memory, of whose share each has an equal part."""

    def _open(self, batch: Batch, indices: BatchIndices | None, timed: TimedForward) -> Opening:
        num_rows = count_rows(batch)
        begin = time.perf_counter()
        keys = row_keys(batch, num_rows)
        hash_s = time.perf_counter() - begin
        if keys is None:
            raise UncacheableError("the input of the model cannot be told apart by sample")
        prospects = Prospects(
            iteration_s=timed.iteration_s,
            prefix_s=timed.prefix_s,
            serve_s=hash_s + HANDLING_S,
            fill_s=hash_s,
            epochs_ahead=self._outlook.epochs(self.num_batches),
        )
        pays, reason = self._ask_gate(prospects)
        if not pays:
            return None, reason, prospects.to_dict()
        prefix = Prefix.find(self.model, self._modules, batch, num_rows)
        rows = prefix.compute(batch, None)
        memory = RowMemory([leaf.length_axis for leaf in prefix.row_leaves], self._limit_bytes)
        prospects = _time_memory(prospects, memory, batch, rows, self.num_batches or 1)
        pays, reason = self._ask_gate(prospects)
        if not pays:
            return None, reason, prospects.to_dict()
        found = MemoryForward(
            prefix=prefix,
            memory=memory,
            boundary=self._modules[-1].name,
            number=self._number,
            verify_batches=self.settings.verify_batches,
            payback=PaybackCheck(timed.iteration_s),
            epoch_batches=self.num_batches or UNKNOWN_EPOCH,
            expected_share=prospects.stored_share,
        )
        reason = f"{reason}; {size_text(prospects.room_bytes)} of memory may be used"
        return found, reason, prospects.to_dict()

    def _limit_bytes(self, stored_bytes: int) -> int:
        """Return how much may be stored here, where all processes of this host have stored as much
        as this one.
        """
        free_bytes = free_memory_bytes() + self.num_local * stored_bytes
        return int(free_bytes * self.settings.memory_share / self.num_local)

    def _ask_gate(self, prospects: Prospects) -> tuple[bool, str]:
        if self.settings.gate == "open":
            return True, "cache.gate is 'open'"
        pays, reason = judge(prospects, is_in_memory=True)
        trial_s = TRIAL_ITERATIONS * prospects.iteration_s
        if pays and self.num_batches and prospects.total_gain_s * self.num_batches < trial_s:
            return False, (
                "finding out how to skip the frozen layers takes longer than the epochs ahead "
                "would save"
            )
        return pays, reason


def _time_memory(
    prospects: Prospects, memory: RowMemory, batch: Batch, rows: Sequence[Tensor], num_batches: int
) -> Prospects:
    """Write a batch into memory and read it back; add what that takes, and leave the memory empty.

    `num_batches` come until all samples are known.
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
        return replace(prospects, needed_bytes=100 * room_bytes + 1, room_bytes=room_bytes)
    padded_length = None if lengths is None else int(batch.kwargs["attention_mask"].shape[1])
    for leaf, own in zip(memory.read(keys, memory.knows(keys), padded_length), rows, strict=True):
        torch.empty_like(own).copy_(leaf)
    read_s = time.perf_counter() - written
    memory.close()
    return replace(
        prospects,
        serve_s=prospects.serve_s + read_s,
        fill_s=prospects.fill_s + written - begin,
        needed_bytes=batch_bytes * num_batches,
        room_bytes=room_bytes,
    )
