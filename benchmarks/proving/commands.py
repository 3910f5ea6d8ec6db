"""The verbs of `python -m benchmarks`."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.proving import RefusedError
from benchmarks.proving.catalogue import REGISTRY, find_workloads, list_workloads
from benchmarks.proving.comparing import archive
from benchmarks.proving.comparing.comparison import WorkloadComparison, compare
from benchmarks.proving.comparing.record import write_record
from benchmarks.proving.comparing.results import read_results
from benchmarks.proving.comparing.tables import overview, quality_table, time_table
from benchmarks.proving.policies import Policy, parse_policies
from benchmarks.proving.running import recipe, runfile
from benchmarks.proving.running.execution import build
from benchmarks.proving.running.limit import UNLIMITED, Limit
from benchmarks.proving.running.progress import Bars
from benchmarks.proving.running.runfile import RunFile, WorkloadFacts
from benchmarks.proving.running.runs import Place, describe_left, find_left, make, sort_out, status_of
from benchmarks.workloads.workload import Training, Workload


def run_list(options: argparse.Namespace, console: Console) -> int:
    """List the workloads."""
    for _, workload in list_workloads((*options.workloads, REGISTRY) if not options.only else options.workloads):
        direction = "higher" if workload.higher_is_better else "lower"
        told = workload.paper or ("not for tuning" if workload.is_held_out else "")
        line = f"{workload.name:32} {workload.metric} ({direction} is better)  {told}"
        console.print(line.rstrip(), highlight=False, soft_wrap=True)
    return 0


def run_runs(options: argparse.Namespace, console: Console) -> int:
    """Make the runs that are wanted and not finished."""
    if options.again and options.minutes is not None:
        raise RefusedError(
            f"--again makes anew also what the last piece left, so that with --minutes it would never end. Remove the "
            f"runs from {options.results}, or leave one of the two out."
        )
    limit = Limit.after(options.minutes, options.began_s)
    return _make_policies(parse_policies(options.policy), options, console, again=options.again, limit=limit)


def run_compare(options: argparse.Namespace, console: Console) -> int:
    """Compare kept runs; print the tables, and write the record where one is asked for."""
    with archive.opened(options.results) as results:
        _compare(compare(read_results(results, options.workload, options.tier), options.against), options, console)
    return 0


def _compare(comparisons: Sequence[WorkloadComparison], options: argparse.Namespace, console: Console) -> None:
    for comparison in comparisons:
        console.print(f"\n{comparison.workload.name} ({comparison.tier})\n", style="bold")
        for text in (quality_table(comparison), time_table(comparison)):
            console.print(text + "\n", highlight=False, soft_wrap=True, markup=False)
    if options.out is not None:
        write_record(comparisons, options.out)
        console.print(f"written: {options.out / 'README.md'}", soft_wrap=True)


def run_table(options: argparse.Namespace, console: Console) -> int:
    """Print one line for each workload."""
    with archive.opened(options.results) as results:
        comparisons = compare(read_results(results, options.workload, options.tier), options.against)
    console.print(overview(comparisons), highlight=False, soft_wrap=True, markup=False)
    return 0


def _make_policies(
    policies: Sequence[Policy],
    options: argparse.Namespace,
    console: Console,
    *,
    again: bool = False,
    limit: Limit = UNLIMITED,
) -> int:
    """Make the runs of some policies on all workloads and seeds that are asked for; return the exit status."""
    workloads = _find_workloads(options)
    wanted = [
        _wanted(module, workload, policy, seed, options)
        for seed in options.seeds
        for module, workload in workloads
        for policy in policies
    ]
    if again:
        for run in wanted:
            shutil.rmtree(options.results / run.place, ignore_errors=True)
    recipes = {workload.name: _recipe(workload, options) for _, workload in workloads}
    return _make(wanted, recipes, options, console, limit)


def _make(
    wanted: Sequence[RunFile],
    recipes: dict[str, Any],
    options: argparse.Namespace,
    console: Console,
    limit: Limit = UNLIMITED,
) -> int:
    """Make what is missing, as far as the limit allows; return the exit status."""
    archive.refuse_to_write(options.results)
    known = {name: found for name, found in recipes.items() if found is not None}
    missing = sort_out(wanted, options.results, known)
    if len(missing) < len(wanted):
        console.print(f"finished before: {len(wanted) - len(missing)} of {len(wanted)} runs", highlight=False)
    if not missing:
        return 0
    place = Place(data=options.data, results=options.results, jobs=options.jobs, limit=limit)
    with Bars(console, len(missing)) as bars:
        made = make(missing, place, bars)
    for run in made.failed:
        console.print(f"failed: {run.name}: {run.error}", style="red", highlight=False, soft_wrap=True, markup=False)
    left = find_left(wanted, options.results)
    if limit.is_set:
        console.print(describe_left(left, len(wanted), made), highlight=False, soft_wrap=True, markup=False)
    return status_of(left, made)


def _find_workloads(options: argparse.Namespace) -> list[tuple[str, Workload]]:
    """Return the workloads that are asked for.

    Raises:
        RefusedError: nobody has such a workload, or it has no recipe for the tier.
    """
    found = find_workloads(options.workload, options.workloads)
    for _, workload in found:
        if options.tier not in workload.tiers:
            raise RefusedError(
                f"{workload.name} has the tiers {', '.join(workload.tiers)}; found --tier {options.tier}. Choose one."
            )
    return found


def _wanted(module: str, workload: Workload, policy: Policy, seed: int, options: argparse.Namespace) -> RunFile:
    return RunFile(
        status=runfile.WAITING,
        workload=WorkloadFacts(
            name=workload.name,
            metric=workload.metric,
            higher_is_better=workload.higher_is_better,
            is_relative=workload.is_relative,
            paper=workload.paper,
            is_held_out=workload.is_held_out,
        ),
        module=module,
        tier=options.tier,
        seed=seed,
        policy=policy,
        device=_device(options),
    )


def _recipe(workload: Workload, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return what the workload trains now; None where nothing is finished that it could be compared with.

    Raises:
        RefusedError: finished runs were made by another recipe.
    """
    finished = [
        (path.parent, found)
        for path in sorted((options.results / workload.name / options.tier).rglob(runfile.FILE_NAME))
        if (found := runfile.load(path.parent)) is not None and found.status == runfile.FINISHED
    ]
    if not finished:
        return None
    now = recipe.describe(_build(workload, options))
    for directory, found in finished:
        changed = sorted(name for name in {**now, **found.recipe} if now.get(name) != found.recipe.get(name))
        if changed:
            told = "; ".join(f"{name} was {found.recipe.get(name)!r}, now {now.get(name)!r}" for name in changed)
            raise RefusedError(
                f"{found.name} is finished in {directory}, but was made by another recipe: {told}. Runs of both "
                f"cannot be compared. Give another --results, or make all runs of the workload again with --again."
            )
    return now


def _build(workload: Workload, options: argparse.Namespace) -> Training:
    if options.tier != "gpu":
        torch.set_num_threads(1)
    return build(workload, options.data, options.tier, options.seeds[0], torch.device(_device(options)))


def _device(options: argparse.Namespace) -> str:
    """Return the device of the tier, or the one asked for.

    Raises:
        RefusedError: there is no such device.
    """
    device = options.device or ("cuda" if options.tier == "gpu" else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RefusedError(
            "The gpu tier trains on an accelerator, and torch finds none here. Take --tier cpu, or try it dry with "
            "--device cpu."
        )
    return str(device)


def folder(text: str) -> Path:
    """Return a path as the command line takes it, `~` put in."""
    return Path(text).expanduser()
