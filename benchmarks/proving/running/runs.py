"""Which runs are wanted, making those that are not finished, each in a process of its own, and what is left then."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.proving import RefusedError
from benchmarks.proving.running import checkpoint, runfile
from benchmarks.proving.running.execution import NO_DATA_STATUS, OUTPUT_NAME, PAUSED_STATUS
from benchmarks.proving.running.limit import LAST_S, UNLIMITED, Experience, Limit
from benchmarks.proving.running.progress import Bars, Show
from benchmarks.proving.running.recipe import ROOT
from benchmarks.proving.running.runfile import RunFile

NOT_YET_STATUS = 75
"""Exit status where nothing failed and not all is finished: the shell's own for 'try again later'."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where runs find their data and leave their results."""

    data: Path
    results: Path
    jobs: int = 1
    limit: Limit = UNLIMITED
    """Of the time that all of them may take together."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """What came of making runs; those that are neither finished nor here are left for another time."""

    failed: list[RunFile]
    """With their errors."""
    num_epochs: int
    """Epochs that ended, in all runs."""


def sort_out(wanted: Sequence[RunFile], results: Path, recipes: dict[str, dict[str, Any]]) -> list[RunFile]:
    """Return the runs that are still to be made; finished ones are left out, broken ones are not.

    Args:
        wanted: all runs.
        results: the directory of all results.
        recipes: what the workloads train now, by `recipe.describe`; of a workload that is not
            here, the recipe is not compared.

    Raises:
        RefusedError: a finished run in the way was made with other settings, or is being made.
    """
    missing = []
    for run in wanted:
        found = runfile.load(results / run.place)
        if found is not None and found.status == runfile.FINISHED:
            _check_same(found, run, recipes.get(run.workload.name), results)
        elif found is not None and _is_alive(found):
            raise RefusedError(
                f"{run.name} is being made by process {found.pid}. Wait for it, or give another --results."
            )
        else:
            missing.append(run)
    return missing


def _check_same(found: RunFile, run: RunFile, recipe: dict[str, Any] | None, results: Path) -> None:
    known = [] if recipe is None else [recipe]
    differences = [
        f"{what} was {before!r}, now {now!r}"
        for what, before, now in (
            ("the policy", found.policy.name, run.policy.name),
            ("its settings", found.policy.settings, run.policy.settings),
            ("the device", found.device, run.device),
            *((name, found.recipe.get(name), now.get(name)) for now in known for name in {**now, **found.recipe}),
        )
        if before != now
    ]
    if differences:
        raise RefusedError(
            f"{run.name} is finished in {results / run.place}, but was made otherwise: {'; '.join(differences)}. "
            f"Give another --results, or make it again with --again."
        )


def _is_alive(found: RunFile) -> bool:
    """Tell whether a process still makes this run; its number may long be another's."""
    try:
        return bool(found.pid) and "benchmarks.proving.running.execution" in psutil.Process(found.pid).cmdline()
    except psutil.Error:
        return False


def make(wanted: Sequence[RunFile], place: Place, bars: Bars) -> Made:
    """Make runs in turn, at most `place.jobs` at a time, as far as there is time."""
    queue = Queue(wanted, place, bars)
    breaking_off = threading.Timer(place.limit.left_s() - LAST_S, queue.stop)
    if place.limit.is_set:
        breaking_off.start()
    with ThreadPoolExecutor(place.jobs) as workers:
        try:
            for done in [workers.submit(queue.work) for _ in range(place.jobs)]:
                done.result()
        finally:
            breaking_off.cancel()
            queue.stop()
    return Made(failed=queue.failed, num_epochs=queue.experience.num_epochs)


class Queue:
    """Runs that wait, those that go on, and those that failed."""

    def __init__(self, wanted: Sequence[RunFile], place: Place, bars: Bars) -> None:
        self.failed: list[RunFile] = []
        self.experience = Experience()
        self._waiting = iter(wanted)
        self._place = place
        self._bars = bars
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self._without_data: dict[str, str] = {}
        self._stopped = False

    def work(self) -> None:
        """Make one run after the other until none waits for which there is time."""
        for run in self._take():
            if not self._place.limit.allows(self.experience.needed_s(run.workload.name)):
                continue
            reason = self._without_data.get(run.workload.name)
            error = reason if reason is not None else self._make(run)
            if error and not self._stopped:
                self.failed.append(dataclasses.replace(run, status=runfile.FAILED, error=error))

    def stop(self) -> None:
        """Let nothing new begin, and end what still goes on (after an interrupt, or when time is over)."""
        self._stopped = True
        for process in tuple(self._processes):
            process.terminate()

    def _take(self) -> Iterator[RunFile]:
        while not self._stopped:
            with self._lock:
                run = next(self._waiting, None)
            if run is None:
                return
            yield run

    def _make(self, run: RunFile) -> str:
        """Make a run; return why it failed, or nothing."""
        directory = self._place.results / run.place
        found = runfile.load(directory)
        if found is not None and _is_alive(found):  # by a command that began after this one
            return f"process {found.pid} of another command is making it"
        epoch = self._find_epoch(directory)
        if self._stopped:
            return ""
        is_begun = epoch is not None
        run = dataclasses.replace(run, epoch=epoch or 0)
        run.save(directory)
        with (directory / OUTPUT_NAME).open("a" if is_begun else "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                _command(directory, self._place),
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=_environment(run),
            )
            self._processes.add(process)
            with process, self._bars.follow(run.name) as show:
                self._follow(process, run, show)
            self._processes.discard(process)
        if process.returncode in (0, PAUSED_STATUS):
            return ""
        error = _error(directory, process.returncode)
        if process.returncode == NO_DATA_STATUS:
            self._without_data[run.workload.name] = error
        return error

    def _find_epoch(self, directory: Path) -> int | None:
        """Return the epoch of the checkpoint that a run goes on from; None, and an empty directory, without one."""
        found = runfile.load(directory)
        if found is not None and (directory / checkpoint.FILE_NAME).exists():
            return found.epoch
        shutil.rmtree(directory, ignore_errors=True)  # of a run that was broken off: a journal is only appended to
        return None

    def _follow(self, process: subprocess.Popen[str], run: RunFile, show: Show) -> None:
        """Show what a run says of itself until it ends."""
        began_s = time.monotonic()
        first: int | None = None
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            if "note" in said:
                self._bars.tell(f"{run.name}: {said['note']}")
                continue
            show(**said)
            if first is None:
                first = said["epoch"]
                continue
            self.experience.num_epochs += 1
            if said["epoch"] == first + 1:
                self.experience.note(run.workload.name, time.monotonic() - began_s)


def _command(directory: Path, place: Place) -> list[str]:
    """Return the command line of a run's process."""
    program = [sys.executable, "-u", "-m", "benchmarks.proving.running.execution"]
    command = [*program, str(directory), "--data", str(place.data)]
    return [*command, "--ends-at", str(place.limit.ends_at_s)] if place.limit.is_set else command


def _error(directory: Path, status: int) -> str:
    found = runfile.load(directory)
    return (found.error if found else "") or f"its process ended with status {status}; see {directory / OUTPUT_NAME}"


def _environment(run: RunFile) -> dict[str, str]:
    """Return the environment of a run's process."""
    paths = [str(ROOT), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # Waiting threads that spin would count as CPU time and slow a busy machine down.
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    if run.tier != "gpu":
        environment["OMP_NUM_THREADS"] = "1"
    return environment


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
