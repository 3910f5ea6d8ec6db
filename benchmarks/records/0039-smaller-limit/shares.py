"""Whether the errors of shares of worth are those that shares scatter by between runs; see FINDINGS.md.

    python shares.py JOURNALS [JOURNALS ...]

JOURNALS: folders with runs of the default (`journals.tar.xz` of records, unpacked). For each workload, of the second
half of the first look: mean share of each layer module but the last, its scatter between runs, and the error that one
run estimates (root mean square), as of a sum and as of a ratio.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from egeria.policy.shares import _error, complete
from egeria.policy.worth import FIRST_LOOK_SHARE, SETTLED_SHARE


def shares(journal):
    """Return (share, error of a sum, error of a ratio) of each layer module but the last; None where not measured."""
    rows, last = [], 0
    for line in journal.open():
        event = json.loads(line)
        if event["event"] == "interval":
            last = event["step"]
            if event.get("worth"):
                rows.append((last, event["worth"]))
    rows = complete([worth for step, worth in rows if SETTLED_SHARE * last < step <= FIRST_LOOK_SHARE * last])
    columns = list(zip(*rows, strict=True))[:-1]
    if len(rows) < 3 or any(None in column for column in columns):
        return None
    total = math.fsum(max(0.0, math.fsum(column)) for column in columns)
    wholes = [math.fsum(row[:-1]) for row in rows]
    found = []
    for column in columns:
        share = math.fsum(column) / total
        apart = [part - share * whole for part, whole in zip(column, wholes, strict=True)]
        found.append((share, _error(column) / total, _error(apart) / total))
    return found


def describe(runs, ratios):
    """Return a cell for each layer module, and add scatter by error to `ratios`."""
    for column in zip(*runs, strict=True):
        own, *errors = zip(*column, strict=True)
        scatter, means = statistics.stdev(own), [math.sqrt(statistics.fmean(x * x for x in error)) for error in errors]
        for found, error in zip(ratios, means, strict=True):
            found.append(scatter / error)
        yield f"{statistics.fmean(own):.1%} ± {scatter:.1%} (sum {means[0]:.1%}, ratio {means[1]:.1%})"


def main():
    """Print a line for each workload, and the median of all modules."""
    by_workload, ratios = defaultdict(list), ([], [])
    for journal in sorted(
        path for folder in sys.argv[1:] for path in Path(folder).rglob("default/seed*/journal.jsonl")
    ):
        if (found := shares(journal)) is not None:
            by_workload[journal.parents[3].name].append(found)
    for workload, runs in sorted(by_workload.items()):
        if len(runs) > 1:
            print(f"{workload}, {len(runs)} runs:", "; ".join(describe(runs, ratios)))
    for name, found in zip(("sum", "ratio"), ratios, strict=True):
        print(f"scatter / error of a {name}: median {statistics.median(found):.2f} of {len(found)}")


if __name__ == "__main__":
    main()
