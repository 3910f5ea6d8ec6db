"""Prints how large the tree is, by package of the library, and fails over the limits in pyproject.toml.

    python scripts/size.py

Only files that git tracks are counted, and nothing of egeria is imported. Lines are all lines of Python files,
statements are nodes of `ast.stmt`, settings are the fields of the subclasses of `SettingsGroup`. A function is long
when it has over 45 lines without its docstring.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "src/egeria/"
MOST_LINES = 45
"""Of a function, without its docstring."""
SETTINGS_GROUP = "SettingsGroup"
"""The base class of the groups of settings."""
COLUMNS = ("files", "lines", "statements", "settings", f"functions over {MOST_LINES} lines")
KEYS = ("files", "lines", "statements", "settings", "long_functions")
"""Of the columns, in the table of limits."""


def main(root: Path = ROOT) -> int:
    """Print the tables; return 1 if a limit is exceeded, else 0."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    names = [name for name in tracked.split("\0") if name and (root / name).exists()]
    packages: dict[str, Counter[str]] = {}
    for name in names:
        if name.startswith(LIBRARY) and name.endswith(".py"):
            package, slash, _ = name.removeprefix(LIBRARY).partition("/")
            packages.setdefault(package if slash else "(top)", Counter()).update(_measured((root / name).read_text()))
    library: Counter[str] = sum(packages.values(), Counter())
    sizes = {f"library_{key}": library[key] for key in KEYS}
    for folder in ("benchmarks", "soak", "tests"):
        files = [name for name in names if name.startswith(f"{folder}/") and name.endswith(".py")]
        sizes[f"{folder}_files"] = len(files)
        sizes[f"{folder}_lines"] = sum(len((root / name).read_text().splitlines()) for name in files)
    # A record of a measurement takes no room from the code.
    sizes["tracked_files"] = sum(not name.startswith("benchmarks/records/") for name in names)
    with (root / "pyproject.toml").open("rb") as file:
        limits = tomllib.load(file)["tool"]["egeria"]["limits"]
    if unknown := limits.keys() - sizes.keys():
        raise SystemExit(f"pyproject.toml limits what is not counted: {', '.join(sorted(unknown))}")
    rows = [[name, *(f"{counts[key]:,}" for key in KEYS)] for name, counts in sorted(packages.items())]
    _print_table([["package", *COLUMNS], *rows, ["egeria", *(f"{library[key]:,}" for key in KEYS)]])
    _print_table([["", "now", "limit", ""], *_compared(sizes, limits)])
    return int(any(sizes[name] > limit for name, limit in limits.items()))


def _measured(text: str) -> Counter[str]:
    """Return the counts of one file of Python."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    groups = [node for node in nodes if isinstance(node, ast.ClassDef) and _is_group(node)]
    return Counter(
        files=1,
        lines=len(text.splitlines()),
        statements=sum(isinstance(node, ast.stmt) for node in nodes),
        settings=sum(isinstance(entry, ast.AnnAssign) for group in groups for entry in group.body),
        long_functions=sum(_num_lines(node) > MOST_LINES for node in nodes if isinstance(node, ast.FunctionDef)),
    )


def _is_group(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == SETTINGS_GROUP for base in node.bases)


def _num_lines(function: ast.FunctionDef) -> int:
    """Return the lines of a function from `def` on, without those of its docstring."""
    first, num_lines = function.body[0], (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return num_lines
    return num_lines - ((first.end_lineno or 0) - first.lineno + 1)


def _compared(sizes: dict[str, int], limits: dict[str, int]) -> list[list[str]]:
    """Return a row for each number: its name, what it is, its limit, and by how much it is over that."""
    rows = []
    for name, size in sizes.items():
        limit = limits.get(name)
        over = "" if limit is None or size <= limit else f"{size - limit:,} over"
        rows.append([name.replace("_", " "), f"{size:,}", "" if limit is None else f"{limit:,}", over])
    return rows


def _print_table(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    sys.stdout.write("\n")


if __name__ == "__main__":
    sys.exit(main())
