"""Letting a trial of the oracle begin where it first differs from plain training, with what that had learned by then.

Until something freezes, egeria changes no bit of a training; so whatever plain training kept at the end of an epoch is
what the trial would have come to. Its journal begins with that of plain training, and tells where it branched off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from pathlib import Path

from benchmarks.proving.policies import PLAIN, parse_policy
from benchmarks.proving.running import checkpoint, runfile
from benchmarks.proving.running.checkpoint import UnusableError
from benchmarks.proving.running.runfile import RunFile
from benchmarks.proving.schedules import FINEST
from egeria.config.checks import read_timetable
from egeria.journal import FILE_NAME as JOURNAL_NAME


def branch_off(run: RunFile, results: Path) -> int | None:
    """Put the latest fitting checkpoint of plain training into the empty directory of a run.

    Args:
        run: of the policy 'static', not begun.
        results: the directory of all results.

    Returns:
        How many epochs the run may leave out; None where plain training kept none that fits, or freezes land, which
        takes what is averaged before them. Then nothing was put there.
    """
    if run.policy.settings.get("freezing", {}).get("landing", "none") != "none":
        return None
    source = results / dataclasses.replace(run, policy=parse_policy(PLAIN)).place
    plain = runfile.load(source)
    if plain is None or plain.status != runfile.FINISHED:
        return None
    first_share, _ = read_timetable(run.policy.settings["policy"]["schedule"])[0]
    for epoch in range(_last_epoch(first_share, plain.recipe["num_epochs"]), 0, -1):
        with contextlib.suppress(UnusableError):
            if found := checkpoint.read(checkpoint.kept(source, epoch)):
                directory = results / run.place
                directory.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / JOURNAL_NAME, directory)
                checkpoint.save(checkpoint.rename(found, run.policy), directory)
                return epoch
    return None


def begin_epochs(num_epochs: int) -> frozenset[int]:
    """Return the epochs behind which the schedules of a search begin."""
    return frozenset(_last_epoch(place * FINEST, num_epochs) for place in range(1, round(1 / FINEST))) - {0}


def _last_epoch(share: float, num_epochs: int) -> int:
    """Return the last epoch that ends before a share of the training: where one ends with it, something is frozen."""
    return math.ceil(share * num_epochs - 1e-9) - 1
