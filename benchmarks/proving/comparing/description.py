"""The text of a record: what was found, then how it was measured and how to repeat it."""

from collections.abc import Mapping, Sequence

from benchmarks.proving.comparing.comparison import PER_CENT, POINTS, WorkloadComparison
from benchmarks.proving.comparing.tables import overview, quality_table, time_table, timelines

HOW_SPREAD = """\
- Mean ± sample standard deviation over seeds. A difference is paired: the run against the plain run of the same
  seed, which has the same initial weights, batches and augmentation."""
HOW_INTERVAL = """\
- The 95 % interval of a difference is Student's t over the seeds; with three it reaches 2.5 standard deviations to
  each side. One that holds 0 may be chance."""
HOW_TIME = """\
- Time is of training: loading, forward, backward, optimizer, and all of egeria (attaching, judging, its controller
  process and threads, closing). Evaluation on held-out data is excluded. Wall-clock time depends on what else the
  machine does; CPU time adds up all threads and processes."""
HOW_JUDGED = """\
- Where a workload has a judge, final quality is that on its larger set of held-out data, asked once at the end."""
HOW_COMPUTE = """\
- Compute skipped is the share of the run's floating-point work that was not done: backward passes of frozen layer
  modules, and of those updated at some steps only, at the others; and forward passes for the samples that stored
  activations served. Backward is as much work as forward, and as much again for the gradients of weights, as far as
  they train. Of 'short' it is the share of the steps that were not made. What measuring takes is not taken off: it is
  in the times."""
HOW_LOSS = f"""\
- A mean loss of at most {POINTS} points, or {PER_CENT:g} % where the metric is judged relatively, counts as none."""


def describe(comparisons: Sequence[WorkloadComparison], pictures: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """Return the README of a record."""
    parts = ["# Proving ground: what each policy saves, and what it costs", overview(comparisons)]
    for comparison in comparisons:
        names = pictures[comparison.workload.name, comparison.tier]
        parts += _section(comparison, names)
    points = (HOW_SPREAD, HOW_INTERVAL, HOW_JUDGED, HOW_TIME, HOW_COMPUTE, HOW_LOSS)
    return "\n\n".join([*parts, method(*points), circumstances(comparisons), _commands(comparisons)]) + "\n"


def method(*points: str) -> str:
    """Return the section that tells how it was measured."""
    return "\n".join(["## How it was measured\n", *points])


def heading(comparison: WorkloadComparison) -> str:
    """Return the heading of a workload, and what it trains and how."""
    recipe = comparison.policies[0].outcomes[0].run.recipe
    workload = comparison.workload
    paper = f" The paper's row: {workload.paper}." if workload.paper else ""
    direction = "higher" if workload.higher_is_better else "lower"
    told = " Nothing is tuned on it." if workload.is_held_out else ""
    return (
        f"## {workload.name} ({comparison.tier})\n\n"
        f"{recipe['model']}, {recipe['num_parameters']:,} parameters, {recipe['num_epochs']} epochs of "
        f"{recipe['steps_per_epoch']} steps, {recipe['optimizer']}, {recipe['scheduler']}. "
        f"{workload.metric}: {direction} is better.{paper}{told}"
    )


def _section(comparison: WorkloadComparison, pictures: Sequence[str]) -> list[str]:
    parts = [heading(comparison), quality_table(comparison), time_table(comparison)]
    parts.append("\n".join(f"![{name.removesuffix('.svg')}]({name})" for name in pictures))
    lines = timelines(comparison)
    if lines:
        parts.append("Frozen layer modules, by epoch:\n\n" + "\n".join(lines))
    return parts


def circumstances(comparisons: Sequence[WorkloadComparison]) -> str:
    """Tell machines, versions and commits; of runs that differ, all."""
    found: dict[str, list[str]] = {}
    for comparison in comparisons:
        for policy in comparison.policies:
            for outcome in policy.outcomes:
                for name, value in outcome.run.made_with.items():
                    values = found.setdefault(name, [])
                    if str(value) not in values:
                        values.append(str(value))
    threads = {str(found.policies[0].outcomes[0].run.recipe.get("torch_threads")) for found in comparisons}
    lines = [f"- {name}: {', '.join(sorted(values))}" for name, values in found.items()]
    lines.append(f"- torch threads: {', '.join(sorted(threads))}")
    if len(found.get("commit", [])) > 1:
        lines.append("- Runs are from several commits; each says which in its `run.json`.")
    return "## Machine and versions\n\n" + "\n".join(lines)


def _commands(comparisons: Sequence[WorkloadComparison]) -> str:
    lines = [_command(comparison) for comparison in comparisons]
    lines.append(f"python -m benchmarks compare --results RESULTS --against {comparisons[0].base} --out RECORD")
    told = "This page from the journals kept here: `--results RECORD/journals`."
    return "## Command\n\n```\n" + "\n".join(lines) + f"\n```\n\n{told}"


def _command(comparison: WorkloadComparison) -> str:
    policies = ",".join(policy.policy for policy in comparison.policies)
    seeds = ",".join(map(str, sorted({seed for policy in comparison.policies for seed in policy.seeds})))
    return (
        f"python -m benchmarks run {comparison.workload.name} --policy {policies} "
        f"--seeds {seeds} --tier {comparison.tier}{_device(comparison)} --data DIR --results RESULTS"
    )


def _device(comparison: WorkloadComparison) -> str:
    """Return the option that names the device, where it is not the one of the tier."""
    usual = "cuda" if comparison.tier == "gpu" else "cpu"
    return "" if comparison.device == usual else f" --device {comparison.device}"
