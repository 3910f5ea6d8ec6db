"""The proving ground: trains workloads under rival policies and compares what came of them."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.distributed import scale_record
from benchmarks.proving import commands
from benchmarks.proving.errors import RefusedError
from benchmarks.proving.policies import PLAIN
from benchmarks.proving.running.limit import now_s
from benchmarks.proving.studies.smartfrz import Labelling
from benchmarks.workloads.workload import TIERS, MissingDataError
from egeria.errors import ConfigError

DATA, RESULTS = Path("../shared/data"), Path("benchmarks/results")
RECORDS = Path(__file__).parent / "records"


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

    oracle = verbs.add_parser("oracle", help="search the schedule that skips most without loss")
    oracle.add_argument("workload", type=_names, metavar="WORKLOAD[,WORKLOAD]")
    most = "of the search, plain and finished ones counted"
    oracle.add_argument("--most-runs", type=_count, default=60, metavar="N", help=most)
    more = "seeds besides those of the search with which the best schedule must lose nothing either"
    oracle.add_argument("--confirm", type=_seeds, default=[], metavar="1,2", help=more)
    setting = "of egeria, for every schedule of the search, such as modules.target_share=0.1; can be repeated"
    oracle.add_argument("--setting", action="append", default=[], metavar="GROUP.KEY=VALUE", help=setting)
    _add_making(oracle)
    oracle.set_defaults(verb=commands.run_oracle)
    _add_sensitivity(verbs)
    _add_trials(verbs)
    posthoc = verbs.add_parser("posthoc", help="when each layer module became what it is in the trained network")
    posthoc.add_argument("workload", type=_names, metavar="WORKLOAD[,WORKLOAD]")
    posthoc.add_argument("--out", type=commands.folder, metavar="DIR", help="folder of the record")
    _add_making(posthoc)
    posthoc.set_defaults(verb=commands.run_posthoc)
    _add_smartfrz(verbs)
    scale = verbs.add_parser("scale", help="what freezing saves on up to a thousand ranks, simulated")
    scale.add_argument("--steps", type=_count, default=scale_record.STEPS, metavar="N", help="of a run")
    scale.add_argument(
        "--exchanges", type=_count, default=scale_record.EXCHANGES, metavar="N", help="of egeria in a run"
    )
    scale.add_argument("--records", type=commands.folder, default=RECORDS, metavar="DIR", help="with 0010 and 0020")
    scale.add_argument("--out", type=commands.folder, metavar="DIR", help="folder of the record")
    scale.set_defaults(verb=scale_record.run_scale)
    return parser


def _add_sensitivity(verbs: Any) -> None:
    sensitivity = verbs.add_parser("sensitivity", help="what a parameter of a policy does to quality and saving")
    sensitivity.add_argument("workload", nargs="?", type=_names, default=[], metavar="WORKLOAD[,WORKLOAD]")
    swept = "POLICY:key=value,value,..., the last key is swept; can be repeated; none reads a record's journals"
    sensitivity.add_argument("--sweep", action="append", default=[], metavar="SWEEP", help=swept)
    sensitivity.add_argument("--out", type=commands.folder, metavar="DIR", help="folder of the record")
    _add_making(sensitivity)
    sensitivity.set_defaults(verb=commands.run_sensitivity)


def _add_trials(verbs: Any) -> None:
    trials = verbs.add_parser("trials", help="whether worth, plasticity and others foretell what a freeze costs")
    told = "none reads a record's journals"
    trials.add_argument("workload", nargs="?", type=_names, default=[], metavar="WORKLOAD[,WORKLOAD]", help=told)
    times = "shares of the training from which on front layer modules are frozen"
    trials.add_argument("--times", type=_shares, default=[0.06, 0.25, 0.5, 0.75], metavar="0.06,0.25", help=times)
    depths = "how many are; more than may freeze are left out"
    trials.add_argument("--depths", type=_counts, default=[1, 3, 5], metavar="1,3,5", help=depths)
    trials.add_argument("--out", type=commands.folder, metavar="DIR", help="folder of the record")
    _add_making(trials)
    trials.set_defaults(verb=commands.run_trials)


def _add_smartfrz(verbs: Any) -> None:
    smartfrz = verbs.add_parser("smartfrz", help="train the predictor of 'smartfrz' on plain trainings")
    smartfrz.add_argument("workload", type=_names, metavar="WORKLOAD[,WORKLOAD]")
    held_out = "of --seeds: judges it, and trains nothing"
    smartfrz.add_argument("--held-out", type=_seeds, default=[], metavar="3", help=held_out)
    smartfrz.add_argument("--epochs", type=_count, default=20, metavar="N", help="over the examples")
    usual = Labelling()
    least = "likeness to the trained network, by linear CKA, that makes the label 'freeze'"
    smartfrz.add_argument("--least-cka", type=float, default=usual.least_cka, metavar="X", help=least)
    most = "variance that it may have over --span intervals"
    smartfrz.add_argument("--most-variance", type=float, default=usual.most_variance, metavar="X", help=most)
    smartfrz.add_argument("--span", type=_count, default=usual.span, metavar="N", help="twentieths of the training")
    smartfrz.add_argument("--out", type=commands.folder, metavar="DIR", help="none only watches the trainings")
    _add_making(smartfrz)
    smartfrz.set_defaults(verb=commands.run_smartfrz)


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


def _counts(text: str) -> list[int]:
    return list(dict.fromkeys(map(_count, text.split(","))))


def _shares(text: str) -> list[float]:
    shares = list(dict.fromkeys(map(float, text.split(","))))
    if not all(0.01 <= share < 1 for share in shares):
        raise argparse.ArgumentTypeError(f"must be from 0.01 to below 1, found {text}")
    return shares


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, found {text}")
    return minutes


if __name__ == "__main__":
    raise SystemExit(main(began_s=psutil.Process().create_time()))  # importing torch takes its time too
