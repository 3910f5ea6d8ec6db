"""The glossary names what the library has, and no class name of the library means two things."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "egeria").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
ROW = re.compile(r"^\| (?P<word>[^|]+) \| (?P<meaning>[^|]+) \|$", re.MULTILINE)


def names_of(node):
    """Yield the names that a node of the syntax tree defines."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


def test_every_name_in_the_glossary_exists():
    known = {name for tree in TREES.values() for node in ast.walk(tree) for name in names_of(node)}
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    names = [name for quoted in re.findall(r"`([^`]+)`", text) for name in quoted.split(".") if name != "code"]
    assert names and [name for name in names if name not in known] == []


def test_the_glossary_is_sorted_and_has_each_word_once():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = [match["word"].replace("*", "").casefold() for match in ROW.finditer(text)][1:]
    assert len(words) > 40 and words == sorted(set(words))


def test_no_class_name_stands_for_two_things():
    places = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    del places["EgeriaCallback"]  # each framework has one of its own
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
