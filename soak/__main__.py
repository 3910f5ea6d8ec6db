"""`scripts/soak`: random small trainings with random faults, each compared bit for bit with the same made by hand.

`cases` draws them, `training` has the loop, `trials` the faults and what must hold.
"""

import argparse
import collections
import contextlib
import gc
import json
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from soak.cases import Case, cases
from soak.trials import check


class Soak:
    def __init__(self, minutes: float, shrinking_s: float) -> None:
        self.begin, self.shrinking_s = time.monotonic(), shrinking_s
        self.ends = self.begin + 60 * minutes
        self.kinds = list[tuple[str, str, str]]()
        self.failed, self.found = dict[str, BaseException](), ""

    def trial(self, case: Case) -> None:
        line = str(case)
        if time.monotonic() > self.ends:
            if line in self.failed:  # what Hypothesis ends with has to fail again
                raise self.failed[line]
            return
        self.kinds.append(case.kind)
        try:
            check(case)
        except Exception as error:
            if not self.failed:
                self.ends = (now := time.monotonic()) + self.shrinking_s
                self.found = f"training {len(self.kinds)}, after {now - self.begin:.0f} s"
            self.failed[line] = error
            raise

    def run(self, number: int) -> None:
        """Make trials in batches, each with a seed of its own, until the time is over or one fails."""
        database = DirectoryBasedExampleDatabase(Path(".hypothesis", "soak"))
        options: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": database}
        options["phases"] = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)

        while time.monotonic() < self.ends and not self.failed:
            # Anew, since what it is given to is marked; and no method, of which it would change the class.
            trial = given(cases())(lambda case: self.trial(case))  # noqa: PLW0108
            try:
                seed(number)(settings(max_examples=200, verbosity=Verbosity.quiet, **options)(trial))()
            except Exception:
                if not self.failed:
                    raise
            number += 1
            print(f"{len(self.kinds)} trainings in {time.monotonic() - self.begin:.0f} s", flush=True)

    def tell(self) -> int:
        for names in zip(*self.kinds, strict=True):
            print("  " + ", ".join(f"{name} {count}" for name, count in collections.Counter(names).most_common()))
        print(f"{len(self.kinds)} trainings, {'a failure' if self.failed else 'no failure'}")
        if not self.failed:
            return 0
        line = min(self.failed, key=len)
        print("".join(traceback.format_exception(self.failed[line])[-8:]))
        print(f"Found in {self.found}. To make it again:\n  scripts/soak --case {shlex.quote(line)}")
        return 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to look for a smaller case that fails too")
    parser.add_argument("--case", help="make one trial again, as printed by a failure")
    told = parser.parse_args()
    torch.set_num_threads(1)
    soak = Soak(told.minutes, told.shrink)
    gc.freeze()  # what is here now need not be looked at behind each trial
    if told.case:
        with contextlib.suppress(Exception):
            soak.trial(Case(**json.loads(told.case)))
    else:
        soak.run(1000 * told.seed)
    return soak.tell()


if __name__ == "__main__":
    sys.exit(main())
