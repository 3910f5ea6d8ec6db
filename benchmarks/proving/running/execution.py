"""The process of one run: reads its `run.json`, trains, and says on each line of output how far it is.

    python -m benchmarks.proving.running.execution DIRECTORY --data DIR [--ends-at S]

Started by `runs`. A line of output is a JSON object; what others print goes to the error output.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.proving import RefusedError
from benchmarks.proving.catalogue import find_workloads
from benchmarks.proving.running import checkpoint, recipe, runfile
from benchmarks.proving.running.checkpoint import Checkpoint, UnusableError
from benchmarks.proving.running.limit import UNLIMITED, Limit
from benchmarks.proving.running.piece import Piece
from benchmarks.proving.running.runfile import RunFile
from benchmarks.proving.running.training import train
from benchmarks.rivals import shorten
from benchmarks.workloads.workload import MissingDataError, Setting, Training, Workload

NO_DATA_STATUS = 3
"""Exit status where the data are not there: other runs of the workload need not be tried."""
PAUSED_STATUS = 4
"""Exit status where the time is over before the run is finished; the epochs it made lie in its checkpoint."""
OUTPUT_NAME = "output.txt"

Say = Callable[[dict[str, Any]], object]
"""Takes how far the run is, or a `note` for whoever asked for it."""


def main() -> int:
    """Make one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ends-at", type=float, metavar="S", help="seconds since 1970 at which it has to be over")
    options = parser.parse_args()
    wanted = runfile.load(options.directory)
    if wanted is None:
        raise SystemExit(f"{options.directory} must hold a run.json that `python -m benchmarks run` wrote")
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        return execute(
            wanted,
            options.directory,
            options.data,
            lambda record: print(json.dumps(record), file=output, flush=True),
            Limit(options.ends_at),
        )


def execute(wanted: RunFile, directory: Path, data: Path, say: Say, limit: Limit = UNLIMITED) -> int:
    """Make the run that is wanted; return the exit status, after writing down how it ended."""
    running = dataclasses.replace(wanted, status=runfile.RUNNING, pid=os.getpid())
    running.save(directory)
    try:
        is_finished = _train(running, directory, data, say, limit)
    except (MissingDataError, RefusedError) as error:
        _end(directory, running, runfile.FAILED, str(error))
        return NO_DATA_STATUS
    except Exception as error:
        traceback.print_exc()
        _end(directory, running, runfile.FAILED, f"{type(error).__name__}: {error}")
        return 1
    if not is_finished:
        _end(directory, running, runfile.PAUSED)
        return PAUSED_STATUS
    _end(directory, running, runfile.FINISHED)
    checkpoint.remove(directory)
    return 0


def _train(running: RunFile, directory: Path, data: Path, say: Say, limit: Limit) -> bool:
    """Train from the checkpoint or from the beginning; tell whether the run is finished."""
    device = torch.device(running.device)
    if running.tier != "gpu":
        torch.set_num_threads(1)
    (_, workload), *_ = find_workloads([running.workload.name], [running.module])
    training = build(workload, data, running.tier, running.seed, device)
    made_with = recipe.describe_circumstances(device)
    running = dataclasses.replace(running, recipe=recipe.describe(training), made_with=made_with, epoch=0)
    identity = checkpoint.identify(running)
    training = shorten(training, running.policy.name, running.policy.settings)
    piece = Piece(
        training,
        device,
        directory,
        limit=limit,
        identity=identity,
        commit=made_with["commit"],
        begun=_find_checkpoint(directory, identity, say),
        saved=lambda epoch: dataclasses.replace(running, epoch=epoch).save(directory),
    )
    running = dataclasses.replace(running, made_with={**made_with, **piece.made_with}, epoch=piece.num_done)
    running.save(directory)

    def tell(epoch: int, frozen: float, values: dict[str, float]) -> None:
        metric = values[workload.metric]
        say({"epoch": epoch, "epochs": training.num_epochs, "frozen": frozen, "metric": str(metric)})

    say({"epoch": piece.num_done, "epochs": training.num_epochs, "frozen": 0, "metric": ""})
    return train(training, running.policy, directory, device, tell, piece=piece)


def _find_checkpoint(directory: Path, identity: dict[str, Any], say: Say) -> Checkpoint | None:
    """Return where the run goes on from; one that cannot is told, and removed with its journal and its cache."""
    try:
        return checkpoint.load(directory, identity)
    except UnusableError as error:
        say({"note": f"begins anew, because the checkpoint in {directory} {error}"})
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (runfile.FILE_NAME, OUTPUT_NAME):
            path.unlink()
    return None


def _end(directory: Path, running: RunFile, status: str, error: str = "") -> None:
    """Write down how a run ended, beside what was found out while it was made."""
    known = runfile.load(directory) or running
    epoch = 0 if status == runfile.FINISHED else known.epoch
    dataclasses.replace(known, status=status, error=error, pid=0, epoch=epoch).save(directory)


def build(workload: Workload, data: Path, tier: str, seed: int, device: torch.device) -> Training:
    """Build a run; the global random numbers are the same before and after, whatever building draws."""
    _seed(seed)
    training = workload.build(Setting(data=data, tier=tier, seed=seed, device=device))
    _seed(seed)
    return training


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


if __name__ == "__main__":
    raise SystemExit(main())
