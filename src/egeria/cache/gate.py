"""Whether storing activations pays: numbers in, a decision out."""

from __future__ import annotations

from dataclasses import asdict, dataclass

LEAST_SHARE = 0.1
"""Share of the samples that must fit, or looking them up is not worth the trouble."""
LEAST_EPOCHS, LEAST_EPOCHS_IN_MEMORY = 2.0, 1.2
"""Epochs that must be ahead: the first one fills the store, which costs little in memory."""
LEAST_GAIN = 0.02
"""Share of an iteration that skipping must save: below it, what is measured is mostly noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospects:
    """What storing the activations of one boundary would bring and cost; seconds are of one
    mini-batch.
    """

    iteration_s: float
    """The whole iteration as it is now, with the prefix computed."""
    prefix_s: float
    """Of that, the forward pass of the prefix."""
    serve_s: float
    """Work of the training thread for a batch from the store: telling samples apart, stubs,
    copies; and processor time of the reader thread."""
    read_s: float = 0.0
    """Reading a batch that the page cache does not hold, by the reader thread."""
    fill_s: float = 0.0
    """Copying and writing a batch while the store fills."""
    needed_bytes: int = 0
    """Stored size of all samples."""
    room_bytes: int = 0
    """What may be used."""
    epochs_ahead: float = 0.0
    """Epochs before the boundary can move or the run ends."""

    @property
    def stored_share(self) -> float:
        """Share of the samples that fit."""
        return min(1.0, self.room_bytes / self.needed_bytes) if self.needed_bytes else 1.0

    @property
    def gain_s(self) -> float:
        """Seconds that a batch from the store saves; the slower of training and reading sets the
        pace.
        """
        return self.iteration_s - max(self.iteration_s - self.prefix_s + self.serve_s, self.read_s)

    @property
    def total_gain_s(self) -> float:
        """Seconds per batch of an epoch, over all epochs ahead: what hits save less what filling
        costs.
        """
        saved_s = max(0.0, self.epochs_ahead - 1) * self.gain_s
        return self.stored_share * (saved_s - min(self.epochs_ahead, 1.0) * self.fill_s)

    def to_dict(self) -> dict[str, float]:
        """Return the numbers that decide, for the journal."""
        derived = {name: getattr(self, name) for name in ("stored_share", "gain_s", "total_gain_s")}
        return {name: float(value) for name, value in {**asdict(self), **derived}.items()}


def judge(prospects: Prospects, *, is_in_memory: bool = False) -> tuple[bool, str]:
    """Return whether storing pays, and why.

    The first obstacle met is the reason; the order is from the cheapest to measure to the dearest,
    so that a caller may ask before it has measured everything.

    Args:
        prospects: what was measured so far.
        is_in_memory: whether that is where activations go.
    """
    least_epochs = LEAST_EPOCHS_IN_MEMORY if is_in_memory else LEAST_EPOCHS
    if prospects.epochs_ahead < least_epochs:
        return False, (
            f"the boundary may move or the run end within {prospects.epochs_ahead:.1f} epochs, "
            f"and storing takes at least {least_epochs:g} to pay"
        )
    if prospects.stored_share < LEAST_SHARE:
        settings = "cache.memory_share" if is_in_memory else "cache.limit_bytes, cache.limit_share"
        return False, (
            f"the activations take {size_text(prospects.needed_bytes)}, and "
            f"{size_text(prospects.room_bytes)} may be used ({settings})"
        )
    if prospects.gain_s < LEAST_GAIN * prospects.iteration_s:
        return False, _no_gain(prospects)
    if prospects.total_gain_s <= 0:
        return False, "filling the store costs more than the epochs ahead would save"
    share = prospects.gain_s / prospects.iteration_s
    return True, f"a batch from the store saves {share:.0%} of an iteration"


def _no_gain(prospects: Prospects) -> str:
    iteration_ms, prefix_ms = 1e3 * prospects.iteration_s, 1e3 * prospects.prefix_s
    if prospects.prefix_s - prospects.serve_s < LEAST_GAIN * prospects.iteration_s:
        return (
            f"the frozen forward pass takes {prefix_ms:.2f} ms of an iteration of "
            f"{iteration_ms:.1f} ms, and a batch from the store {1e3 * prospects.serve_s:.2f} ms"
        )
    return (
        f"reading a batch from the disk takes {1e3 * prospects.read_s:.1f} ms, too long beside "
        f"an iteration of {iteration_ms:.1f} ms that would be {prefix_ms:.1f} ms shorter"
    )


def size_text(num_bytes: int) -> str:
    """Write an amount of memory in the unit that reads best."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"
