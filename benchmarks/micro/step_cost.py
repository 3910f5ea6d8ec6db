"""CPU time of a step with egeria attached, by policy, over the bare loop; and the files that a quiet step enters.

    python -m benchmarks.micro.step_cost [POLICY ...] [--rounds 400] [--turn 5] [--files] [--json FILE]
    PYTHONPATH=OLDER/src:. python -m benchmarks.micro.step_cost none static:schedule=0.9:1

A POLICY is NAME or NAME:group.key=value,key=value; a key alone is one of [policy]. Each trains a small network of its
own on the same batch, one more trains bare, and all take turns of a few steps in every round. Only `attach`, `run.step`
and `run.close` are used, so that the same file measures an older checkout. Nothing should freeze meanwhile:
`total_steps` is ten times what is measured. Means count what comes only now and then, medians do not.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import egeria

POLICIES = ("none", "plan:plan=0.9:1", "egeria:controller.kind=inline,freezing.tolerance_readings=1000000")
WARM_UP, QUIET = 20, 20  # rounds that are not counted, and steps of which the one that enters fewest files counts


class Loop:
    """A network in training; without a policy it is bare."""

    def __init__(self, policy: str | None, total_steps: int, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.inputs, self.labels = torch.randn(32, 64), torch.randint(0, 10, (32,))
        self.name, self.run = policy or "bare", None
        if policy is not None:
            given: dict[str, Any] = {"policy": policy.partition(":")[0], "config": read_settings(policy)}
            given |= {"total_steps": total_steps, "directory": tempfile.mkdtemp(dir=folder)}
            self.run = egeria.attach(self.model, self.optimizer, **given)

    def turn(self, count: int) -> float:
        """Make so many steps; return the CPU microseconds of one."""
        began = time.process_time_ns()
        for _ in range(count):
            loss = nn.functional.cross_entropy(self.model(self.inputs), self.labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.run is not None:
                self.run.step(loss)
        return (time.process_time_ns() - began) / count / 1e3

    def quiet_files(self) -> list[str]:
        """Return the files of egeria that a step enters in which nothing happens."""
        root, found = str(Path(egeria.__file__).parent), []
        for _ in range(QUIET):
            entered: set[str] = set()
            sys.setprofile(lambda frame, *_, entered=entered: entered.add(frame.f_code.co_filename))
            self.turn(1)
            sys.setprofile(None)
            found.append(sorted(name.removeprefix(root) for name in entered if name.startswith(root)))
        return min(found, key=len)


def read_settings(policy: str) -> dict[str, Any]:
    """Return groups of settings; the policy's name is among them, since some depend on it."""
    name, _, text = policy.partition(":")
    found: dict[str, Any] = {"policy": {"name": name}}
    for key, _, value in (piece.partition("=") for piece in text.split(",") if piece):
        group, _, entry = key.rpartition(".")
        try:
            read = json.loads(value)
        except ValueError:
            read = value.replace("+", " ")
        found.setdefault(group or "policy", {})[entry] = read
    return found


def summary(values: list[float]) -> dict[str, float]:
    """Return median, quartiles and mean."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "low": low, "high": high, "mean": statistics.fmean(values)}


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", metavar="POLICY", help=f"none given: {' '.join(POLICIES)}")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--turn", type=int, default=5, metavar="STEPS")
    parser.add_argument("--files", action="store_true", help="count files too, after the measurement")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        count, named = WARM_UP + options.rounds, options.policies or POLICIES
        loops = [Loop(policy, 10 * count * options.turn, Path(folder)) for policy in (None, *named)]
        turns = [loops[place % len(loops) :] + loops[: place % len(loops)] for place in range(count)]
        rounds = [{loop.name: loop.turn(options.turn) for loop in order} for order in turns][WARM_UP:]
        for loop in loops:
            step = summary([row[loop.name] for row in rounds])
            more = summary([row[loop.name] - row["bare"] for row in rounds])
            files = loop.quiet_files() if options.files else []
            found[loop.name] = {"step_us": step, "over_bare_us": more, "files": files}
            spread = f"({more['low']:+.1f} to {more['high']:+.1f}), mean {more['mean']:+.1f}"
            print(f"{loop.name}: {step['median']:.1f} us, over bare {more['median']:+.1f} {spread}; files {len(files)}")
            if loop.run is not None:
                loop.run.close()
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "loops": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
