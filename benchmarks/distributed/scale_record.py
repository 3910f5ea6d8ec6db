"""The record of scaling on paper: the simulator against two ranks that were measured, and then up to a thousand."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from benchmarks.distributed.__main__ import run_ranks
from benchmarks.distributed.hosts import LOCAL, two_hosts, why_not
from benchmarks.distributed.replica import SUBJECTS
from benchmarks.distributed.scale import Cluster, Link, Network, Overhead, Saving, save
from benchmarks.micro import accelerator
from benchmarks.proving.comparing.pictures import save_figure
from benchmarks.proving.comparing.tables import markdown
from benchmarks.proving.errors import RefusedError
from benchmarks.proving.running.recipe import describe_circumstances
from egeria.layers.modules import parse_modules

TWO_RANKS, ONE_ACCELERATOR = "0010-distributed", "0020-accelerator"
ONE_HOST, FREE_CABLE, SLOW_CABLE = "one host", "two hosts", "two hosts, 200 Mbit/s"
FAST = Link(bytes_per_s=2e9, latency_s=5e-5)
"""Two processes of one machine, over loopback or a cable that nothing limits: what is reduced hardly counts."""
SLOW = Link(bytes_per_s=200e6 / 8, latency_s=5e-5)
TWO = {
    ONE_HOST: Cluster(name=ONE_HOST, ranks_per_host=2, inside=FAST, between=FAST),
    FREE_CABLE: Cluster(name=FREE_CABLE, ranks_per_host=1, inside=FAST, between=FAST),
    SLOW_CABLE: Cluster(name=SLOW_CABLE, ranks_per_host=1, inside=FAST, between=SLOW),
}
NVLINK = Link(bytes_per_s=300e9, latency_s=3e-6)
CLUSTERS = (
    Cluster(
        name="400 Gbit/s for each GPU", ranks_per_host=8, inside=NVLINK, between=Link(bytes_per_s=400e9, latency_s=1e-5)
    ),
    Cluster(
        name="100 Gbit/s for each host of 8 GPUs",
        ranks_per_host=8,
        inside=NVLINK,
        between=Link(bytes_per_s=12.5e9, latency_s=3e-5),
    ),
)
RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GLOBAL_BATCH = 8192
"""Samples of all ranks together, where their number grows and the batch does not."""
SCHEDULES: dict[str, tuple[tuple[float, int], ...]] = {
    "bert-base": ((0.67, 1), (0.73, 2), (0.81, 3), (0.86, 4)),
    "resnet50": ((0.58, 1), (0.74, 2), (0.76, 3), (0.78, 4)),
}
"""What the default froze of MiniLM on SST-2 and of ResNet-56 on Tiny ImageNet (record 0015, seed 0), by its
share of the layer modules that may freeze."""
STEPS, EXCHANGES = 100_000, 360
"""Of a run: a hundred intervals, and some shorter ones in its first twentieth; three exchanges end each."""
HALF = 3  # of six layer modules: what the record of the accelerator has with the cache too
WITHIN = 0.15
NUM_MEASURED, UNDISTURBED = 300, 0.1
"""Exchanges, and the share of them that other work on the machine did not hold up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """An iteration of two ranks, measured and simulated."""

    subject: str
    place: str
    depth: int
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """As a share of what was measured."""
        return self.simulated_s / self.measured_s - 1


def two_rank_points(record: Path) -> Iterator[Point]:
    """Yield all that was measured of two ranks, each beside what is simulated.

    What a rank computes is the mean of both networks that limit nothing; the slow cable takes no part in that.
    """
    for name, found in _read(record)["results"].items():
        measured = {place: _medians(found[place]) for place in TWO}
        seconds = [statistics.fmean(pair) for pair in zip(measured[ONE_HOST], measured[FREE_CABLE], strict=True)]
        subject = SUBJECTS[name]()
        network = Network.measured(
            name, batch_size=subject.batch_size, seconds=seconds, tensors=_tensors(subject.build())
        )
        for depth, row in enumerate(found["bytes"]):
            assert row["reduced"] == network.bytes_that_train(depth), "the model is the one that was measured"
        for place, cluster in TWO.items():
            for depth, measured_s in enumerate(measured[place]):
                simulated_s = network.iteration_s(depth, cluster, 2)
                yield Point(subject=name, place=place, depth=depth, measured_s=measured_s, simulated_s=simulated_s)


def networks(record: Path) -> list[Network]:
    """Return BERT-base and ResNet-50 as the accelerator of a record trains them.

    Its rows have some depths; between two of them the time falls straight.
    """
    rows, found = _read(record)["rows"], []
    for name in SCHEDULES:
        own = [row for row in rows if row["model"] == name]
        plain_s = statistics.fmean(row["plain_ms"] for row in own) / 1e3
        known = {0: plain_s, **{row["frozen"]: plain_s * (1 - row["measured"]) for row in own if not row["cached"]}}
        subject = accelerator.SUBJECTS[name]
        (values, *_) = subject.batch(False).values()
        found.append(
            Network.measured(
                name,
                batch_size=len(values),
                seconds=[_between(known, depth) for depth in range(max(known) + 1)],
                tensors=_tensors(subject.make(False)),
                cached={row["frozen"]: plain_s * (1 - row["measured"]) for row in own if row["cached"]},
            )
        )
    return found


def measure_exchange() -> dict[str, float]:
    """Return the seconds in which two ranks agree when nothing holds them up, by network that can be had here."""
    hosts: dict[str, Any] = {ONE_HOST: (LOCAL, LOCAL)}
    arguments = ("resnet56", "--exchange", str(NUM_MEASURED))
    found = {place: _undisturbed(run_ranks(pair, *arguments)) for place, pair in hosts.items()}
    if why_not() is None:
        for place, rate in ((FREE_CABLE, None), (SLOW_CABLE, 200)):
            with two_hosts(rate) as pair:
                found[place] = _undisturbed(run_ranks(pair, *arguments))
    return found


def run_scale(options: argparse.Namespace, console: Console) -> int:
    """Simulate, print, and write the record where one is asked for."""
    records = options.records
    for name in (TWO_RANKS, ONE_ACCELERATOR):
        if not (records / name / "results.json").is_file():
            raise RefusedError(f"--records must be the folder with {name}, which has what is simulated: {records}")
    points = list(two_rank_points(records / TWO_RANKS))
    exchange = measure_exchange()
    rewrap = [
        row["rewrap_s"] for found in _read(records / TWO_RANKS)["results"].values()
        for place in TWO for row in found[place] if row["depth"]
    ]  # fmt: skip
    overhead = Overhead(
        rewrap_s=statistics.median(rewrap), hop_s=max(exchange.values()), num_exchanges=options.exchanges
    )
    found = simulate(networks(records / ONE_ACCELERATOR), overhead, options.steps)
    page = describe(points, found, overhead, exchange, options)
    console.print(page, highlight=False, soft_wrap=True, markup=False)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        for scaling in ("weak", "strong"):
            draw([entry for entry in found if entry.scaling == scaling], options.out / f"{scaling}.svg")
        kept = {
            "circumstances": describe_circumstances(torch.device("cpu")),
            "two_ranks": [{**asdict(point), "error": point.error} for point in points],
            "exchange_s": exchange,
            "overhead": asdict(overhead),
            "curves": [asdict(entry) for entry in found],
        }
        (options.out / "results.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        (options.out / "README.md").write_text(page, encoding="utf-8")
        console.print(f"written: {options.out / 'README.md'}", soft_wrap=True)
    return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """What one network saves in one cluster as its ranks grow in number."""

    network: str
    cluster: str
    scaling: str
    """'weak': each rank keeps its batch; 'strong': all together keep theirs."""
    savings: tuple[Saving, ...]


def simulate(found: Sequence[Network], overhead: Overhead, num_steps: int) -> list[Curve]:
    """Return the savings of each network in each cluster, at all numbers of ranks."""
    curves = []
    for network in found:
        for scaling in ("weak", "strong"):
            for cluster in CLUSTERS:
                savings = tuple(
                    save(
                        network if scaling == "weak" else network.with_batch(GLOBAL_BATCH / num_ranks),
                        cluster,
                        num_ranks,
                        schedule=SCHEDULES[network.name],
                        num_steps=num_steps,
                        overhead=overhead,
                    )
                    for num_ranks in RANKS
                )
                curves.append(Curve(network=network.name, cluster=cluster.name, scaling=scaling, savings=savings))
    return curves


def describe(
    points: Sequence[Point],
    curves: Sequence[Curve],
    overhead: Overhead,
    exchange: dict[str, float],
    options: argparse.Namespace,
) -> str:
    """Return the page of the record."""
    within = sum(abs(point.error) <= WITHIN for point in points)
    lines = [
        [
            point.subject, point.place, str(point.depth), f"{1e3 * point.measured_s:.1f}",
            f"{1e3 * point.simulated_s:.1f}", f"{point.error:+.1%}",
        ]
        for point in points
    ]  # fmt: skip
    parts = [
        "# What freezing saves on many ranks, on paper",
        "    python -m benchmarks scale --out RECORD",
        "Simulated from measured iterations; nothing here was trained on more than two ranks. "
        "[How](../../distributed/scale.py), [in words](FINDINGS.md).",
        "## Two ranks, measured and simulated",
        f"{within} of {len(points)} within {WITHIN:.0%}, the farthest off by "
        f"{max(abs(point.error) for point in points):.0%}. Measured: record {TWO_RANKS}. What a rank computes is the "
        f"mean of both networks that limit nothing; the slow cable took no part in that.",
        markdown(["network", "place", "frozen", "measured ms", "simulated ms", "error"], lines),
        "## Up to a thousand",
        f"Iterations of one H200 (record {ONE_ACCELERATOR}, bfloat16, gradients reduced in float32). Frozen as the "
        f"default froze MiniLM and ResNet-56 (record 0015): "
        + "; ".join(f"{name} {_schedule_text(schedule)}" for name, schedule in SCHEDULES.items())
        + f". Weak: each rank keeps its batch; strong: {GLOBAL_BATCH:,} samples of all ranks together. Egeria's own "
        f"time: {1e3 * overhead.rewrap_s:.1f} ms at each freeze, and {overhead.num_exchanges} exchanges of "
        f"{1e3 * overhead.hop_s:.2f} ms for each further rank in {options.steps:,} steps (measured: "
        + ", ".join(f"{place} {1e3 * seconds:.2f} ms" for place, seconds in exchange.items())
        + ").",
    ]
    for scaling in ("weak", "strong"):
        own = [curve for curve in curves if curve.scaling == scaling]
        parts += [
            f"### {scaling.capitalize()} scaling",
            f"![saving by ranks, {scaling} scaling]({scaling}.svg)",
            "Share of the time of a run that is saved, all of egeria's own taken off; in brackets of an iteration with "
            "3 frozen, and with the cache.",
            markdown(
                ["network", "between hosts", *map(str, RANKS)],
                [[curve.network, curve.cluster, *map(_cell, curve.savings)] for curve in own],
            ),
        ]
    return "\n\n".join(parts) + "\n"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw the saving of a run, and of an iteration with half of the modules frozen, over the number of ranks."""

    def paint(figure: Any) -> None:
        for axes, title, value in zip(
            figure.subplots(1, 2),
            ("a whole run", "an iteration with 3 of 6 frozen"),
            (lambda saving: saving.saved, lambda saving: saving.by_depth[HALF]),
            strict=True,
        ):
            for place, curve in enumerate(curves):
                axes.plot(
                    [saving.num_ranks for saving in curve.savings],
                    [100 * value(saving) for saving in curve.savings],
                    color=("#0f8b8d", "#c4622d")[place // len(CLUSTERS)],
                    linestyle=("-", "--")[place % len(CLUSTERS)],
                    label=f"{curve.network}, {curve.cluster}",
                )
            axes.set_xscale("log", base=2)
            axes.set_xlabel("ranks")
            axes.set_ylabel(f"time saved of {title}, %")
            axes.set_ylim(bottom=0)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)

    save_figure(path, (8.4, 3.9), paint)


def _cell(saving: Saving) -> str:
    return f"{saving.saved:.1%} ({saving.by_depth[HALF]:.0%}, {saving.cached[HALF]:.0%})"


def _tensors(model: nn.Module) -> list[list[int]]:
    sizes = {name: entry.numel() * entry.element_size() for name, entry in model.named_parameters()}
    return [[sizes[name] for name in module.parameters] for module in parse_modules(model)]


def _between(known: dict[int, float], depth: int) -> float:
    before, after = (max(at for at in known if at <= depth), min(at for at in known if at >= depth))
    if before == after:
        return known[depth]
    return known[before] + (known[after] - known[before]) * (depth - before) / (after - before)


def _undisturbed(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(UNDISTURBED * len(seconds))]


def _medians(rows: Sequence[dict[str, Any]]) -> list[float]:
    depths = sorted({row["depth"] for row in rows})
    return [statistics.median(row["wall_s"] for row in rows if row["depth"] == depth) for depth in depths]


def _schedule_text(schedule: Sequence[tuple[float, int]]) -> str:
    return ", ".join(f"{depth} from {share:.0%}" for share, depth in schedule)


def _read(record: Path) -> Any:
    return json.loads((record / "results.json").read_text(encoding="utf-8"))
