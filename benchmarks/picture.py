"""The picture of the README: what was frozen when in one workload of a record, and what that brought; light and dark.

python -m benchmarks.picture --record RECORD --workload bert-sst2 --policy default --out docs/pictures
"""

import argparse
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

from benchmarks.proving.comparing.archive import opened
from benchmarks.proving.comparing.comparison import PolicyComparison, compare
from benchmarks.proving.comparing.results import read_results
from benchmarks.proving.journal import Journal, read_journal
from benchmarks.proving.policies import DEFAULT, PLAIN

COLOURS = {
    "light": {"text": "#1f2933", "soft": "#5f6b76", "train": "#0f8b8d", "frozen": "#cfd8dc"},
    "dark": {"text": "#e6e9ec", "soft": "#9aa5b1", "train": "#35b8b0", "frozen": "#37424b"},
}
WIDTH, LEFT, RIGHT, ROW, BAR, TOP = 760, 150, 24, 26, 16, 58
SCALE = WIDTH - LEFT - RIGHT


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--policy", default=DEFAULT)
    parser.add_argument("--title", default="Fine-tuning MiniLM on SST-2: when each layer module trained")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with opened(options.record / "journals") as journals:
        (comparison,) = compare(read_results(journals, [options.workload]), PLAIN)
        plain, default = comparison.find(PLAIN), comparison.find(options.policy)
        assert plain is not None and default is not None, "a record of plain training and the policy"
        journal = read_journal(default.outcomes[0].directory)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, colours in COLOURS.items():
        drawing = draw(options.title, plain, default, journal, colours)
        (options.out / f"freezing-{name}.svg").write_text(drawing, encoding="utf-8")


def draw(
    title: str, plain: PolicyComparison, default: PolicyComparison, journal: Journal, colours: dict[str, str]
) -> str:
    """Return the SVG: a bar for each layer module of one run, and below two for the CPU time of all seeds."""
    (started, *_) = journal.of("run_started")
    total = started["total_steps"] or 1
    names = [str(module["name"]) for module in started["modules"]]
    saved, difference = default.saved["cpu"], default.difference
    assert saved is not None and difference is not None, "plain runs stand beside, of the same machine"
    lines = [_text(LEFT, 24, title, colours["text"], size=15, weight=600)]
    lines.append(_text(LEFT, 44, "beginning of the training", colours["soft"], size=11))
    lines.append(_text(WIDTH - RIGHT, 44, "end", colours["soft"], size=11, anchor="end"))
    y = TOP
    course = [(0.0, 0), *((event["step"] / total, event.get("frozen", 0)) for event in journal.of("frozen", "thawed"))]
    for place, name in enumerate(names):
        phases = [list(same) for _, same in groupby(course, lambda moment, place=place: place < moment[1])]
        begins = [phase[0] for phase in phases]
        ends = [*(begin for begin, _ in begins[1:]), 1.0]
        parts = [
            (begin, end, "frozen" if place < depth else "train")
            for (begin, depth), end in zip(begins, ends, strict=True)
        ]
        lines += _row(y, name, parts, colours)
        y += ROW
    y += 22
    seeds = len(default.seeds)
    of_what = f"CPU time, mean of {seeds} seeds" if seeds > 1 else "CPU time and accuracy of this run"
    lines.append(_text(LEFT, y, of_what, colours["text"], size=13, weight=600))
    y += 12
    scale = plain.seconds["cpu"].mean
    for policy, what in ((plain, "plain"), (default, "egeria")):
        seconds = policy.seconds["cpu"].mean
        lines += _row(y, what, [(0.0, seconds / scale, "train")], colours)
        told = f"{seconds:.0f} s, {policy.final.mean:.1f} %"
        lines.append(_text(LEFT + 8, y + 12, told, "#ffffff" if colours is COLOURS["light"] else "#10181f", size=11))
        y += ROW
    told = f"{saved.mean:.0f} % saved, {difference.mean:+.1f} points".replace("-", "\N{MINUS SIGN}")
    lines.append(_text(WIDTH - RIGHT, y - ROW + 12, told, colours["text"], size=11, anchor="end"))
    label = escape(f"{title}. {told}.", quote=True)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}" role="img" aria-label="{label}">'
    return "\n".join([head, *lines, "</svg>", ""])


def _row(y: float, name: str, parts: list[tuple[float, float, str]], colours: dict[str, str]) -> Iterator[str]:
    yield _text(LEFT - 10, y + 12, name.replace("bert.", "").replace("encoder.", ""), colours["text"], anchor="end")
    for begin, end, colour in parts:
        if end > begin:
            x, width = LEFT + begin * SCALE, (end - begin) * SCALE
            yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colours[colour]}"/>'


def _text(
    x: float, y: float, text: str, colour: str, *, size: int = 12, weight: int = 400, anchor: str = "start"
) -> str:
    font = "font-family=\"system-ui, -apple-system, 'Segoe UI', sans-serif\""
    where = f'x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f"<text {where} {font}>{escape(text)}</text>"


if __name__ == "__main__":
    main()
