"""The verbs of `python -m benchmarks`."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.proving.catalogue import REGISTRY, find_workloads, list_workloads
from benchmarks.proving.comparing import archive
from benchmarks.proving.comparing.comparison import WorkloadComparison, compare
from benchmarks.proving.comparing.record import write_record
from benchmarks.proving.comparing.results import Outcome, read_results
from benchmarks.proving.comparing.tables import oracle_table, overview, quality_table, time_table
from benchmarks.proving.errors import RefusedError
from benchmarks.proving.policies import PLAIN, Policy, parse_policies, parse_policy, parse_settings
from benchmarks.proving.running import recipe, runfile
from benchmarks.proving.running.execution import build
from benchmarks.proving.running.limit import UNLIMITED, Limit
from benchmarks.proving.running.progress import Bars
from benchmarks.proving.running.runfile import RunFile, WorkloadFacts
from benchmarks.proving.running.runs import Place, describe_left, find_left, make, sort_out, status_of
from benchmarks.proving.studies import posthoc, trials
from benchmarks.proving.studies.oracle import Trials, survey
from benchmarks.proving.studies.posthoc_record import describe_analysis, write_posthoc
from benchmarks.proving.studies.sensitivity import section, write_sensitivity
from benchmarks.proving.studies.smartfrz import Labelling, Wanted, Watched, watch_all
from benchmarks.proving.studies.smartfrz_record import Lesson, train_and_record
from benchmarks.proving.studies.sweeps import Study, load_study, parse_sweeps
from benchmarks.proving.studies.trials_record import describe_findings, find_correlations, write_trials
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
        for text in (quality_table(comparison), time_table(comparison), oracle_table(comparison)):
            if text:
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


def run_oracle(options: argparse.Namespace, console: Console) -> int:
    """Search the schedule of each workload that skips most without loss."""
    for module, workload in _find_workloads(options):
        console.print(f"\n{workload.name} ({options.tier})\n", style="bold")
        _search(module, workload, options, console)
    return 0


def _search(module: str, workload: Workload, options: argparse.Namespace, console: Console) -> None:
    pattern = _wanted(module, workload, parse_policy(PLAIN), options.seeds[0], options)
    recipes = {workload.name: _recipe(workload, options)}

    def make_all(wanted: Sequence[RunFile]) -> None:
        if _make(wanted, recipes, options, console):
            raise RefusedError("The search ends with the run that failed. Mend it; what is finished is kept.")

    settings = parse_settings(options.setting)
    known = survey(_build(workload, options), settings)
    trials = Trials(
        pattern, options.seeds, options.results, make_all, options.most_runs, known.is_in_order, settings
    )  # fmt: skip
    found = trials.search(known.weights, known.falls)
    best = trials.confirm([seed for seed in options.confirm if seed not in options.seeds])
    console.print(f"schedules tried: {len(found.tried)}, without loss {len(found.lossless)}, runs: {trials.num_runs}")
    if not found.finished:
        console.print(f"The budget of {options.most_runs} runs ended the search; more may be found with --most-runs.")
    if best is None:
        console.print("No schedule that was tried loses nothing.")
        return
    saved, difference = best.saved["cpu"], best.difference
    assert difference is not None and best.skipped is not None, "judged by these"
    console.print(
        f"most without loss: {best.policy}, seeds {', '.join(map(str, best.seeds))}: {best.skipped.shows(1)} % of the "
        f"compute, {saved.shows(1) if saved else '?'} % of CPU time, difference {difference.shows(signed=True)}",
        highlight=False,
        soft_wrap=True,
    )


def run_sensitivity(options: argparse.Namespace, console: Console) -> int:
    """Make the runs that sweeps need; print what each value does, and write the record where one is asked for."""
    if bool(options.sweep) != bool(options.workload):
        raise RefusedError("A sweep needs a workload, and a workload a sweep. Give both, or neither to read a record.")
    if options.sweep:
        study = _study(options)
        if _make_policies(study.policies, options, console):
            return 1
        _show_sensitivity(study, options.results, options, console)
        return 0
    with archive.opened(options.results) as results:
        _show_sensitivity(load_study(results), results, options, console)
    return 0


def _show_sensitivity(study: Study, results: Path, options: argparse.Namespace, console: Console) -> None:
    comparisons = study.compare(results)
    for comparison in comparisons:
        console.print(f"\n{comparison.workload.name} ({comparison.tier})\n", style="bold")
        for text in section(study, comparison):
            console.print(text + "\n", highlight=False, soft_wrap=True, markup=False)
    if options.out is not None:
        write_sensitivity(study, comparisons, options.out)
        console.print(f"written: {options.out / 'README.md'}", soft_wrap=True)


def run_trials(options: argparse.Namespace, console: Console) -> int:
    """Make trials of freezes and what they are held against; tell what foretold their cost, and write the record."""
    if not options.workload:
        with archive.opened(options.results) as results:
            _show_trials(trials.choose(read_results(results)), options, console)
        return 0
    for module, workload in _find_workloads(options):
        recipes, known = {workload.name: _recipe(workload, options)}, survey(_build(workload, options))
        pattern = _wanted(module, workload, parse_policy(PLAIN), options.seeds[0], options)
        for wanted in trials.plan(pattern, options.seeds, options.times, options.depths, known):
            if _make(wanted, recipes, options, console):
                return 1
    outcomes = read_results(options.results, options.workload, options.tier)
    _show_trials(trials.choose(outcomes, options.seeds, options.times, options.depths), options, console)
    return 0


def run_posthoc(options: argparse.Namespace, console: Console) -> int:
    """Make plain training with its epochs kept, analyse it, and write the record where one is asked for."""
    found: list[tuple[WorkloadComparison, int, posthoc.Analysis]] = []
    for module, workload in _find_workloads(options):
        known = survey(_build(workload, options))
        pattern = _wanted(module, workload, parse_policy(PLAIN), options.seeds[0], options)
        wanted = [dataclasses.replace(pattern, seed=seed, keeps_epochs=True) for seed in options.seeds]
        if _make(wanted, {workload.name: _recipe(workload, options)}, options, console):
            return 1
        (comparison,) = compare(read_results(options.results, [workload.name], options.tier), PLAIN)
        for run in wanted:
            directory = options.results / run.place
            finished = runfile.load(directory)
            assert finished is not None, "it was just made"
            training = build(workload, options.data, options.tier, run.seed, torch.device(run.device))
            analysis = posthoc.analyse(training, finished, directory, known)
            console.print(f"\n{workload.name} ({options.tier}), seed {run.seed}\n", style="bold")
            for text in describe_analysis(analysis):
                console.print(text + "\n", highlight=False, soft_wrap=True, markup=False)
            found.append((comparison, run.seed, analysis))
    if options.out is not None:
        names, seeds = ",".join(options.workload), ",".join(map(str, options.seeds))
        command = f"python -m benchmarks posthoc {names} --seeds {seeds} --tier {options.tier} --data DIR --out RECORD"
        write_posthoc(found, options.out, command)
        console.print(f"written: {options.out / 'README.md'}", soft_wrap=True)
    return 0


def run_smartfrz(options: argparse.Namespace, console: Console) -> int:
    """Watch plain trainings, those that were watched left out, and train the predictor of 'smartfrz' on them."""
    if options.out is not None and not (options.held_out and {*options.held_out} < {*options.seeds}):
        raise RefusedError(
            f"--held-out must be some of --seeds and not all, found {options.held_out} of {options.seeds}. Give both."
        )
    device, folder = torch.device(options.device or "cpu"), options.results / "smartfrz"
    wanted = [
        Wanted(
            workload=workload.name,
            modules=options.workloads,
            data=options.data,
            tier=options.tier,
            seed=seed,
            device=device,
            kept=folder / workload.name / options.tier / f"seed{seed}.safetensors",
        )
        for _, workload in _find_workloads(options)
        for seed in options.seeds
    ]
    watch_all([entry for entry in wanted if not entry.kept.is_file()], options.jobs)
    if options.out is None:
        return 0
    torch.set_num_threads(1)
    found = [Watched.load(entry.kept) for entry in wanted]
    labelling = Labelling(span=options.span, most_variance=options.most_variance, least_cka=options.least_cka)
    train_and_record(Lesson(found, options.held_out, labelling, options.epochs), options.out, console)
    console.print(f"written: {options.out / 'CARD.md'}", soft_wrap=True)
    return 0


def _show_trials(outcomes: Sequence[Outcome], options: argparse.Namespace, console: Console) -> None:
    points = trials.find_points(outcomes)
    for text in describe_findings(points, find_correlations(points)):
        console.print(text + "\n", highlight=False, soft_wrap=True, markup=False)
    if options.out is not None:
        write_trials(outcomes, options.out)
        console.print(f"written: {options.out / 'README.md'}", soft_wrap=True)


def _study(options: argparse.Namespace) -> Study:
    return Study(
        workloads=tuple(options.workload),
        tier=options.tier,
        seeds=tuple(options.seeds),
        sweeps=parse_sweeps(options.sweep),
    )


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
