"""The proving ground: trains workloads under rival policies and compares what came of them."""

import argparse
import math
import signal
import sys
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks import replay
from benchmarks.proving import RefusedError, commands
from benchmarks.proving.policies import PLAIN
from benchmarks.proving.running.limit import now_s
from benchmarks.workloads.workload import TIERS, MissingDataError
from egeria.errors import ConfigError

DATA, RESULTS = Path("../shared/data"), Path("benchmarks/results")


def main(arguments: list[str] | None = None, began_s: float | None = None) -> int:
    """Run the command line.

    Args:
        arguments: None takes those of the process.
        began_s: when the command began, in seconds since 1970; None stands for now.

    Returns:
        The exit status: 0 done, 1 a run failed, 2 refused, 75 not all finished within --minutes, 130 interrupted.
    """
    options = _parser().parse_args(arguments)
    options.began_s = now_s() if began_s is None else began_s
    console = Console()
    if console.width < 100 and not console.is_terminal:
        console = Console(width=160)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # runs must not outlive us
    try:
        return int(options.verb(options, console))
    except (RefusedError, MissingDataError, ConfigError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks: interrupted; the same command goes on where this one ended", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    listing = verbs.add_parser("list", help="list the workloads")
    _add_workloads(listing)
    listing.add_argument("--only", action="store_true", help="only those of --workloads")
    listing.set_defaults(verb=commands.run_list)

    run = verbs.add_parser("run", help="make runs, one process each, those that are finished left out")
    run.add_argument("workload", type=_names, metavar="WORKLOAD[,WORKLOAD]")
    policies = "none, default, NAME, NAME:key=value,key=value or a TOML file; several with commas"
    run.add_argument("--policy", action="append", required=True, metavar="P[,P]", help=policies)
    run.add_argument("--again", action="store_true", help="make also those again that are finished")
    minutes = "end by itself before so many minutes, unfinished runs with a checkpoint; the same command goes on"
    run.add_argument("--minutes", type=_minutes, metavar="N", help=minutes)
    _add_making(run)
    run.set_defaults(verb=commands.run_runs)

    compare = verbs.add_parser("compare", help="compare finished runs, and write a record of it")
    compare.add_argument("workload", nargs="*", metavar="WORKLOAD")
    compare.add_argument("--out", type=commands.folder, metavar="DIR", help="folder of the record")
    _add_reading(compare)
    compare.set_defaults(verb=commands.run_compare)

    table = verbs.add_parser("table", help="one line for each workload, as markdown")
    _add_reading(table)
    table.set_defaults(verb=commands.run_table, workload=[])

    replaying = verbs.add_parser("replay", help="check that the paper's policy decides as recorded journals say")
    told = "of a run, a folder of runs, or a record"
    replaying.add_argument("directory", nargs="+", type=commands.folder, metavar="DIR", help=told)
    replaying.set_defaults(verb=replay.run_replay)
    return parser


def _add_making(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=_seeds, default=[0, 1, 2], metavar="0,1,2")
    parser.add_argument("--tier", choices=TIERS, default="cpu")
    parser.add_argument("--device", help="other than the tier's own, for a try")
    parser.add_argument("--data", type=commands.folder, default=DATA, metavar="DIR", help="a folder for each data set")
    parser.add_argument("--jobs", type=_count, default=1, metavar="N", help="runs at a time; times are best with 1")
    _add_results(parser)
    _add_workloads(parser)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tier", choices=TIERS, help="only runs of this tier")
    parser.add_argument("--against", default=PLAIN, metavar="P", help="the policy that others are compared with")
    _add_results(parser)


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=commands.folder, default=RESULTS, metavar="DIR", help="where runs are kept")


def _add_workloads(parser: argparse.ArgumentParser) -> None:
    told = "a module with WORKLOADS of your own; can be repeated"
    parser.add_argument("--workloads", action="append", default=[], metavar="MODULE", help=told)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(filter(None, text.split(","))))


def _seeds(text: str) -> list[int]:
    return list(dict.fromkeys(int(part) for part in text.split(",")))


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {count}")
    return count


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, found {text}")
    return minutes


if __name__ == "__main__":
    raise SystemExit(main(began_s=psutil.Process().create_time()))  # importing torch takes its time too
