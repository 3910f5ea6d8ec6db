"""What reading a batch of stored activations costs: time, CPU time, bytes from the disk, memory.

    python -m benchmarks.micro.cache_store [--directory DIR] [--rows 16384] [--rounds 30]

Random rows of a store on the disk, in turn by several readers: the store's own from a cold page cache, the same
a moment after it was advised, the same warm, and for comparison `np.take` from a memory-mapped file as numpy makes
it. Cold means that the pages of the file were dropped before the batch. A whole pass over the store follows,
with what it adds to the resident memory of the process.

The directory must lie on a disk (a file system in memory cannot be cold), and have room for the store.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from egeria.cache.store.disk import DiskStore
from egeria.cache.store.file import ENTRY, HEADER_BYTES
from egeria.cache.store.rows import RowLayout

HEAD_START_S = 0.02
DIM = 64


@dataclass
class Reader:
    """One way to read a batch, and what it took each round."""

    name: str
    read: Callable[[NDArray[np.int64]], None]
    is_cold: bool = True
    prepare: Callable[[NDArray[np.int64]], None] | None = None
    """Done before the clock starts; what it reads from the disk counts."""
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def time(self, positions: NDArray[np.int64]) -> None:
        """Read one batch."""
        disk_before = bytes_from_disk()
        if self.prepare is not None:
            self.prepare(positions)
            time.sleep(HEAD_START_S)
        begin_cpu, begin = cpu_s(), time.perf_counter()
        self.read(positions)
        self.wall_s.append(time.perf_counter() - begin)
        self.cpu_s.append(cpu_s() - begin_cpu)
        self.num_bytes.append(bytes_from_disk() - disk_before)


class Bench:
    """A full store, and the ways to read it."""

    def __init__(self, directory: Path, num_rows: int, row_bytes: int, batch: int) -> None:
        layout = RowLayout(shape=(row_bytes // 4 // DIM, DIM), dtype=torch.float32)
        self.path = directory / "rows"
        self.store = DiskStore.create(self.path, [layout], num_rows)
        self.batch = batch
        self.useful_bytes = batch * self.store.row_bytes
        self._out = torch.empty(batch, *layout.shape)
        rows = torch.randn(batch, *layout.shape)
        for begin in range(0, num_rows, batch):
            positions = np.arange(begin, min(begin + batch, num_rows))
            self.store.write(positions, [rows[: len(positions)]], np.zeros((len(positions), 2)))
        self._random = np.random.default_rng(0)
        self._taken = np.empty((batch, self.store.row_bytes), dtype=np.uint8)
        self._mapped: NDArray[np.uint8] | None = None

    def readers(self) -> list[Reader]:
        """Return them in the order of the table."""
        return [
            Reader("store, cold", self.read),
            Reader(f"store, advised {HEAD_START_S * 1e3:.0f} ms before", self.read, prepare=self.store.advise),
            Reader("store, warm", self.read, is_cold=False),
            Reader("np.take from a memmap, cold", self.take),
        ]

    def read(self, positions: NDArray[np.int64]) -> None:
        """Read a batch from the store."""
        assert self.store.read(positions, [self._out[: len(positions)]]).all()

    def take(self, positions: NDArray[np.int64]) -> None:
        """Read a batch from a mapping that keeps what it touched, as one of a training loop does."""
        if self._mapped is None:
            offset = HEADER_BYTES + self.store.capacity * ENTRY.itemsize
            mapped = np.memmap(self.path, dtype=np.uint8, mode="r", offset=offset)
            self._mapped = mapped.reshape(self.store.capacity, -1)
        np.take(self._mapped, positions, axis=0, out=self._taken[: len(positions)], mode="clip")

    def draw(self) -> NDArray[np.int64]:
        """Return the positions of a batch."""
        return self._random.permutation(self.store.capacity)[: self.batch]

    def forget(self) -> None:
        """Drop the store's pages; mapped ones would stay, so the mapping goes first."""
        self._mapped = None
        descriptor = os.open(self.path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    def growth_bytes(self, read: Callable[[NDArray[np.int64]], None]) -> int:
        """Return how much resident memory a pass over all rows adds, while what it reads from is open."""
        self.forget()
        order = self._random.permutation(self.store.capacity)
        read(order[: self.batch])
        before = psutil.Process().memory_info().rss
        for begin in range(0, len(order), self.batch):
            read(order[begin : begin + self.batch])
        return psutil.Process().memory_info().rss - before


def bytes_from_disk() -> int:
    """Return what this process had read from the disk so far, readahead included."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def cpu_s() -> float:
    """Return the processor time of this process, the kernel's work for it included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(bench: Bench, rounds: int) -> list[Reader]:
    """Let the readers take turns; who begins changes every round, and each has batches of its own."""
    readers = bench.readers()
    for index in range(rounds):
        turn = index % len(readers)
        for reader in readers[turn:] + readers[:turn]:
            positions = bench.draw()
            bench.forget()
            if not reader.is_cold:
                bench.read(positions)
            reader.time(positions)
    return readers


def table(bench: Bench, readers: list[Reader], facts: str) -> Table:
    """Return what was measured."""
    found = Table(title=facts)
    for heading in ("reader", "ms, median", "best", "p95", "CPU ms", "MB from disk", "of useful", "pass adds MB"):
        found.add_column(heading, justify="left" if heading == "reader" else "right")
    for reader in readers:
        wall_ms = sorted(1e3 * wall_s for wall_s in reader.wall_s)
        num_bytes = statistics.mean(reader.num_bytes)
        numbers = (
            statistics.median(wall_ms),
            wall_ms[0],
            wall_ms[int(0.95 * (len(wall_ms) - 1))],
            1e3 * statistics.median(reader.cpu_s),
            num_bytes / 1e6,
            num_bytes / bench.useful_bytes,
            bench.growth_bytes(reader.read) / 1e6,
        )
        found.add_row(reader.name, *(f"{number:.2f}" for number in numbers))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure (default: here)")
    parser.add_argument("--rows", type=int, default=16384, help="in the store")
    parser.add_argument("--row-bytes", type=int, default=32768, help="of a row as float32")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        bench = Bench(Path(directory), options.rows, options.row_bytes, options.batch)
        readers = measure(bench, options.rounds)
        size = bench.store.size_bytes / 1e6
        facts = f"{options.batch} random rows of {bench.store.row_bytes} bytes, store of {size:.0f} MB"
        Console(width=120).print(table(bench, readers, facts))
        bench.store.close()


if __name__ == "__main__":
    main()
