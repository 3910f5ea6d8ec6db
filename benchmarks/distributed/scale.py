"""What freezing saves on many ranks, on paper: measured iterations, buckets as DDP lays them out, a model of the links.

An iteration is a forward pass, a backward pass from the last layer module to the first that trains, during which
buckets of gradients are reduced one after the other as they fill, and the optimizer. Ranks wait for the last bucket.
Frozen front modules have no backward pass and no gradients. Reducing goes within each host first, then between hosts,
by rings or trees, whichever is faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

MIB = 2**20
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB
"""Bytes at which `DistributedDataParallel` closes the first bucket and all others."""
FORWARD_SHARE = 1 / 3
"""Of a forward and a backward pass together, where one of them is not known by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One direction of a connection."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Hosts with as many ranks each, and what connects them."""

    name: str
    ranks_per_host: int
    inside: Link
    """Between any two ranks of a host."""
    between: Link
    """Of each host, for all of its ranks together."""

    def all_reduce_s(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds in which all ranks have the sum of their gradients."""
        local = min(num_ranks, self.ranks_per_host)
        hosts = math.ceil(num_ranks / self.ranks_per_host)
        return _reduce_s(num_bytes, local, self.inside) + _reduce_s(num_bytes, hosts, self.between)


def _reduce_s(num_bytes: float, members: int, link: Link) -> float:
    if members < 2:
        return 0.0
    ring = 2 * (members - 1) / members * num_bytes / link.bytes_per_s + 2 * (members - 1) * link.latency_s
    tree = 2 * num_bytes / link.bytes_per_s + 2 * math.ceil(math.log2(members)) * link.latency_s
    return min(ring, tree)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A stretch of the network: one layer module, or all behind the deepest freeze."""

    backward_s: float
    """Seconds that its freeze takes from an iteration of one rank: its backward pass, its part of the optimizer."""
    tensors: tuple[int, ...]
    """Bytes of its parameters, in the order of their definition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network in training, as one rank trains it."""

    name: str
    batch_size: int
    """Samples of a rank."""
    rest_s: float
    """Seconds of an iteration besides the backward passes of the pieces."""
    spared_s: tuple[float, ...] = ()
    """By depth, the seconds that a cache spares: the frozen forward pass, less serving a batch."""
    pieces: tuple[Piece, ...]
    """Front to back; the last never freezes."""

    @classmethod
    def measured(
        cls,
        name: str,
        *,
        batch_size: int,
        seconds: Sequence[float],
        tensors: Sequence[Sequence[int]],
        cached: Mapping[int, float] = MappingProxyType({}),
    ) -> Network:
        """Return the network that explains measured iterations.

        Args:
            name: of the network.
            batch_size: samples of a rank.
            seconds: of an iteration without reducing, with 0, 1, 2, ... front layer modules frozen. Where more are
                frozen it takes no longer: a time that says otherwise is noise, and counts as the one before.
            tensors: for each layer module the bytes of its parameters, in the order of their definition; what is
                behind the deepest freeze that was measured is taken together.
            cached: seconds of an iteration with so many frozen and their outputs from the cache, where measured.
        """
        falling = list(itertools.accumulate(seconds, min))
        saved = [before - after for before, after in itertools.pairwise(falling)]
        behind = [size for module in tensors[len(saved) :] for size in module]
        forward_of_front = sum(saved) * FORWARD_SHARE / (1 - FORWARD_SHARE)
        last = max(0.0, falling[-1] - forward_of_front) * (1 - FORWARD_SHARE)
        pieces = [Piece(backward_s=part, tensors=tuple(own)) for part, own in zip(saved, tensors, strict=False)]
        return cls(
            name=name,
            batch_size=batch_size,
            rest_s=falling[-1] - last,
            spared_s=tuple(max(0.0, falling[depth] - cached.get(depth, math.inf)) for depth in range(len(falling))),
            pieces=(*pieces, Piece(backward_s=last, tensors=tuple(behind))),
        )

    @property
    def deepest(self) -> int:
        """How many front modules may freeze."""
        return len(self.pieces) - 1

    def with_batch(self, batch_size: float) -> Network:
        """Return the network with another batch: all that it computes takes as many times longer."""
        times = batch_size / self.batch_size
        pieces = tuple(replace(piece, backward_s=piece.backward_s * times) for piece in self.pieces)
        spared_s = tuple(seconds * times for seconds in self.spared_s)
        return replace(self, rest_s=self.rest_s * times, spared_s=spared_s, pieces=pieces)

    def iteration_s(self, depth: int, cluster: Cluster, num_ranks: int, *, is_cached: bool = False) -> float:
        """Return the seconds of an iteration with so many front layer modules frozen."""
        backward_s, free_s = sum(piece.backward_s for piece in self.pieces[depth:]), 0.0
        if num_ranks > 1:
            for filled_s, num_bytes in self._buckets(depth):
                free_s = max(free_s, filled_s) + cluster.all_reduce_s(num_bytes, num_ranks)
        return self.rest_s + max(backward_s, free_s) - (self.spared_s[depth] if is_cached else 0.0)

    def bytes_that_train(self, depth: int) -> int:
        """Return what an iteration reduces."""
        return sum(sum(piece.tensors) for piece in self.pieces[depth:])

    def _buckets(self, depth: int) -> Iterator[tuple[float, int]]:
        """Yield when each bucket is full, in seconds from the beginning of the backward pass, and its bytes.

        The backward pass of a piece gives its gradients back to front, at equal distances.
        """
        now, held, limit = 0.0, 0, FIRST_BUCKET
        for piece in reversed(self.pieces[depth:]):
            now += 0.0 if piece.tensors else piece.backward_s
            for size in reversed(piece.tensors):
                now, held = now + piece.backward_s / len(piece.tensors), held + size
                if held >= limit:
                    yield now, held
                    held, limit = 0, BUCKET
        if held:
            yield now, held


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """What egeria itself takes, as measured on two ranks."""

    rewrap_s: float
    """Laying out the buckets anew, at each freeze."""
    hop_s: float
    """An exchange between two ranks. Rows of all ranks go once around, so that each further rank adds as much."""
    num_exchanges: int
    """Of a whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """What a schedule saves at some number of ranks."""

    num_ranks: int
    plain_s: float
    """Of an iteration with nothing frozen."""
    saved: float
    """Share of the time of the whole run, all overhead counted."""
    overhead: float
    """Of the plain run, what egeria itself takes."""
    by_depth: tuple[float, ...]
    """Share of an iteration saved with 0, 1, 2, ... frozen."""
    cached: tuple[float, ...]
    """The same with their outputs from the cache."""


def save(
    network: Network,
    cluster: Cluster,
    num_ranks: int,
    *,
    schedule: Sequence[tuple[float, int]],
    num_steps: int,
    overhead: Overhead,
) -> Saving:
    """Return what freezing by a schedule saves.

    Args:
        network: as one rank trains it.
        cluster: where.
        num_ranks: of them all.
        schedule: shares of the training, growing, and how many front layer modules are frozen from there on.
        num_steps: iterations of the run.
        overhead: of egeria.
    """
    seconds = [network.iteration_s(depth, cluster, num_ranks) for depth in range(network.deepest + 1)]
    begun = [(0.0, 0), *((share, min(depth, network.deepest)) for share, depth in schedule), (1.0, 0)]
    run_s = num_steps * sum((end - share) * seconds[depth] for (share, depth), (end, _) in itertools.pairwise(begun))
    own_s = len(schedule) * overhead.rewrap_s + overhead.num_exchanges * overhead.hop_s * (num_ranks - 1)
    plain_s = num_steps * seconds[0]
    return Saving(
        num_ranks=num_ranks,
        plain_s=seconds[0],
        saved=1 - (run_s + own_s) / plain_s,
        overhead=own_s / plain_s,
        by_depth=tuple(1 - entry / seconds[0] for entry in seconds),
        cached=tuple(
            1 - network.iteration_s(depth, cluster, num_ranks, is_cached=True) / seconds[0]
            for depth in range(network.deepest + 1)
        ),
    )
