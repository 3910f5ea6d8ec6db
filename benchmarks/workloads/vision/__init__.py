"""Image classification and segmentation: CIFAR-10, twenty classes of Tiny ImageNet, CamVid.

Every metric is in %, so that a point is a point.
"""

from functools import partial

from benchmarks.workloads.vision.recipe import SCHEDULES, Schedule
from benchmarks.workloads.vision.task import Task, build
from benchmarks.workloads.vision.tasks import TASKS
from benchmarks.workloads.workload import Workload


def _workload(task: Task, ending: str, schedule: Schedule) -> Workload:
    return Workload(
        name=task.name + ending,
        metric=task.measures[0],
        higher_is_better=True,
        is_relative=False,
        # What the paper reports, it reports for a step schedule.
        paper="" if ending else task.paper,
        build=partial(build, task, schedule),
    )


WORKLOADS: tuple[Workload, ...] = tuple(
    _workload(task, ending, schedule) for task in TASKS for ending, schedule in SCHEDULES.items()
)

__all__ = ["WORKLOADS"]
