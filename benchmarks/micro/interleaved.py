"""Comparing two ways of doing the same thing on a noisy machine: in turn, by the ratio of their medians."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """CPU and wall-clock seconds of the rounds of two candidates, taken in turn."""

    first_cpu_s: list[float]
    second_cpu_s: list[float]
    first_wall_s: list[float]
    second_wall_s: list[float]

    def cpu_ratio(self) -> float:
        """Median over rounds of second / first: what both met in a round (other load, clock speed) cancels out."""
        return statistics.median(b / a for a, b in zip(self.first_cpu_s, self.second_cpu_s, strict=True))

    def wall_ratio(self) -> float:
        """Median over rounds of second / first."""
        return statistics.median(b / a for a, b in zip(self.first_wall_s, self.second_wall_s, strict=True))

    def total_ratio(self) -> tuple[float, float]:
        """CPU and wall-clock ratio of the sums: what comes only now and then counts, as the median would not."""
        return sum(self.second_cpu_s) / sum(self.first_cpu_s), sum(self.second_wall_s) / sum(self.first_wall_s)

    def spread(self) -> tuple[float, float]:
        """First and third quartile of the CPU ratio."""
        ratios = [b / a for a, b in zip(self.first_cpu_s, self.second_cpu_s, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        return low, high


def compare(first: Callable[[], None], second: Callable[[], None], *, rounds: int, warmup: int = 2) -> Comparison:
    """Run both `rounds` times in turn; who begins changes every round."""
    cpu: tuple[list[float], list[float]] = ([], [])
    wall: tuple[list[float], list[float]] = ([], [])
    for index in range(-warmup, rounds):
        order = ((0, first), (1, second)) if index % 2 else ((1, second), (0, first))
        for which, action in order:
            begin_cpu, begin = time.process_time(), time.perf_counter()
            action()
            if index >= 0:
                cpu[which].append(time.process_time() - begin_cpu)
                wall[which].append(time.perf_counter() - begin)
    return Comparison(cpu[0], cpu[1], wall[0], wall[1])
