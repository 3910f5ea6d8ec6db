"""All workloads by name."""

from benchmarks.workloads import text, vision
from benchmarks.workloads.workload import Workload

WORKLOADS: tuple[Workload, ...] = (*vision.WORKLOADS, *text.WORKLOADS)
