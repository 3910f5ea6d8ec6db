"""The process of one run: reads its `run.json`, trains, and says on each line of output how far it is.

    python -m benchmarks.proving.execution DIRECTORY --data DIR

Started by `runs`. A line of output is a JSON object; what others print goes to the error output.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import sys
import traceback
from pathlib import Path

import numpy as np
import torch

from benchmarks.proving import recipe, runfile
from benchmarks.proving.catalogue import find_workloads
from benchmarks.proving.errors import RefusedError
from benchmarks.proving.runfile import RunFile
from benchmarks.proving.training import train
from benchmarks.workloads.workload import MissingDataError, Setting, Training, Workload

NO_DATA_STATUS = 3
"""Exit status where the data are not there: other runs of the workload need not be tried."""


def main() -> int:
    """Make one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    wanted = runfile.load(options.directory)
    if wanted is None:
        raise SystemExit(f"{options.directory} must hold a run.json that `python -m benchmarks run` wrote")
    output = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        return execute(wanted, options.directory, options.data, lambda line: print(line, file=output, flush=True))


def execute(wanted: RunFile, directory: Path, data: Path, say) -> int:
    """Make the run that is wanted; return the exit status, after writing down how it ended."""
    running = dataclasses.replace(wanted, status=runfile.RUNNING, pid=os.getpid())
    running.save(directory)
    try:
        device = torch.device(wanted.device)
        if wanted.tier != "gpu":
            torch.set_num_threads(1)
        (_, workload), *_ = find_workloads([wanted.workload.name], [wanted.module])
        training = build(workload, data, wanted.tier, wanted.seed, device)
        made_with = recipe.describe_circumstances(device)
        running = dataclasses.replace(running, recipe=recipe.describe(training), made_with=made_with)
        running.save(directory)

        def tell(epoch: int, frozen: float, values: dict[str, float]) -> None:
            metric = values[workload.metric]
            say(json.dumps({"epoch": epoch, "epochs": training.num_epochs, "frozen": frozen, "metric": str(metric)}))

        say(json.dumps({"epoch": 0, "epochs": training.num_epochs, "frozen": 0, "metric": ""}))
        train(training, wanted.policy, directory, device, tell)
    except (MissingDataError, RefusedError) as error:
        dataclasses.replace(running, status=runfile.FAILED, error=str(error)).save(directory)
        return NO_DATA_STATUS
    except Exception as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        dataclasses.replace(running, status=runfile.FAILED, error=message).save(directory)
        return 1
    dataclasses.replace(running, status=runfile.FINISHED, pid=0).save(directory)
    return 0


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
