"""Image classification and segmentation: CIFAR-10, twenty classes of Tiny ImageNet, CamVid.

Every metric is in %, so that a point is a point.
"""

from functools import partial

from benchmarks.workloads.vision import efficient, transfer
from benchmarks.workloads.vision.recipe import (
    SCHEDULES,
    Schedule,
    cosine_schedule,
    linear_schedule,
    warm_cosine_schedule,
)
from benchmarks.workloads.vision.task import Task, build
from benchmarks.workloads.vision.tasks import TASKS
from benchmarks.workloads.workload import Workload


def _workload(task: Task, schedule: Schedule, *, ending: str = "") -> Workload:
    return Workload(
        name=task.name + ending,
        metric=task.measures[0],
        higher_is_better=True,
        is_relative=False,
        # What the paper reports, it reports for a step schedule.
        paper="" if ending else task.paper,
        tiers=tuple(task.recipes),
        build=partial(build, task, schedule),
    )


WORKLOADS: tuple[Workload, ...] = (
    *(_workload(task, schedule, ending=ending) for task in TASKS for ending, schedule in SCHEDULES.items()),
    _workload(transfer.CLASSES, cosine_schedule),
    _workload(transfer.SMALLER, linear_schedule),
    _workload(transfer.SCENES, linear_schedule),
    _workload(efficient.WITH_ADAMW, warm_cosine_schedule),
    _workload(efficient.WITH_SGD, warm_cosine_schedule),
)

__all__ = ["WORKLOADS"]
