"""`scripts/soak`: makes random trials until the time is over, and prints one command that makes a failure again."""

import argparse
import collections
import contextlib
import gc
import os
import shlex
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from soak.cases import Case, cases
from soak.trials import check

BATCH = 200
"""Trials of one call of Hypothesis."""


class Soak:
    """Makes trials until a moment; remembers those that failed."""

    def __init__(self, ends: float, shrinking_s: float) -> None:
        self.ends, self.begin, self.shrinking_s = ends, time.monotonic(), shrinking_s
        self.kinds = collections.Counter[str]()
        self.failed = dict[str, BaseException]()

    def trial(self, case: Case) -> None:
        """Make one trial, unless the time is over."""
        line = case.to_json()
        if time.monotonic() > self.ends:
            if line in self.failed:  # what Hypothesis ends with has to fail again
                raise self.failed[line]
            return
        self.kinds[case.kind] += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(case)
        except Exception as error:
            if not self.failed:
                self.ends = time.monotonic() + self.shrinking_s
                self.found_s, self.found_at = time.monotonic() - self.begin, self.num_trials
            self.failed[line] = error
            raise

    @property
    def num_trials(self) -> int:
        """How many trials were made."""
        return sum(self.kinds.values())

    def run(self, number: int) -> None:
        """Make trials in batches, each with a seed of its own, until the time is over or one fails."""
        database = DirectoryBasedExampleDatabase(Path(".hypothesis", "soak"))
        options = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": database}
        phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
        while time.monotonic() < self.ends and not self.failed:
            batch: Any = given(cases())(lambda case: self.trial(case))
            batch = settings(max_examples=BATCH, phases=phases, verbosity=Verbosity.quiet, **options)(seed(number)(batch))
            with contextlib.suppress(Exception):
                batch()
            number += 1
            self._say(f"{self.num_trials} trainings in {time.monotonic() - self.begin:.0f} s")

    def tell(self) -> int:
        """Print what was trained, and the smallest case that failed; return the exit status."""
        for field in range(3):
            found = collections.Counter[str]()
            for kind, count in self.kinds.items():
                found[kind.rsplit(", ", 2)[field]] += count
            self._say("  " + ", ".join(f"{name} {count}" for name, count in found.most_common()))
        self._say(f"{self.num_trials} trainings, {len(self.failed) and 'a failure' or 'no failure'}")
        if not self.failed:
            return 0
        line = min(self.failed, key=len)
        frames = traceback.format_exception(self.failed[line])
        is_ours = isinstance(self.failed[line], AssertionError)
        self._say("".join(frames[-1:] if is_ours else frames[-8:]))
        self._say(f"Found in training {self.found_at}, after {self.found_s:.0f} s. To make it again:")
        self._say(f"  scripts/soak --case {shlex.quote(line)}")
        return 1

    @staticmethod
    def _say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def main() -> int:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with seeds of its own")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to look for a smaller case that fails too")
    parser.add_argument("--case", help="make one trial again, as printed by a failure")
    given_ = parser.parse_args()
    torch.set_num_threads(1)
    soak = Soak(time.monotonic() + 60 * given_.minutes, given_.shrink)
    if given_.case:
        with contextlib.suppress(Exception):
            soak.trial(Case.from_json(given_.case))
        return soak.tell()
    if given_.jobs == 1:
        gc.freeze()  # what is here now need not be looked at behind each trial
        soak.run(1000 * given_.seed)
        return soak.tell()
    options = ["--minutes", str(given_.minutes), "--shrink", str(given_.shrink)]
    command = [sys.executable, "-m", "soak", *options, "--seed"]
    children = [subprocess.Popen([*command, str(given_.seed * 100 + job)]) for job in range(given_.jobs)]
    return max(child.wait() for child in children)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
