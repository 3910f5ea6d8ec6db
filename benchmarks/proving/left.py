"""What a command in pieces leaves for the next time, in words and as an exit status."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.proving import runfile
from benchmarks.proving.runfile import RunFile
from benchmarks.proving.runs import Made

NOT_YET_STATUS = 75
"""Exit status where nothing failed and not all is finished: the shell's own for 'try again later'."""


def find_left(wanted: Sequence[RunFile], results: Path) -> list[RunFile]:
    """Return the runs that are not finished, as they lie there; those that never began as they are wanted."""
    found = [runfile.load(results / run.place) or run for run in wanted]
    return [run for run in found if run.status != runfile.FINISHED]


def describe_left(left: Sequence[RunFile], num_wanted: int, made: Made) -> str:
    """Return what is finished and what is left, a line for each run that is part-way, and what to do."""
    part_way = [
        f"part-way: {run.name}, {run.epoch} of {run.recipe.get('num_epochs', '?')} epochs" for run in left if run.epoch
    ]
    told = f"finished: {num_wanted - len(left)} of {num_wanted} runs; left: {len(left)}."
    if status_of(left, made) == NOT_YET_STATUS:
        told += " Again, please: the same command goes on from here."
    elif left and not made.num_epochs:
        told += " No epoch ended in this time: give more --minutes."
    return "\n".join([*part_way, told])


def status_of(left: Sequence[RunFile], made: Made) -> int:
    """Return 0 where nothing is left, 1 where a run failed or nothing moves in such pieces, else `NOT_YET_STATUS`."""
    if not left:
        return 0
    return 1 if made.failed or not made.num_epochs else NOT_YET_STATUS
