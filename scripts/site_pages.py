"""Pages of the site that are made from the source, the records and the changelog; a hook of MkDocs.

Nothing of egeria is imported: what is written comes from the text of the source, so that the site builds without torch.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "egeria"
RECORDS = ROOT / "benchmarks" / "records"
WAYS_OUT = ROOT / "docs" / "ways_out.toml"
RAISED = ("UnsupportedModelError", "UncacheableError", "require")
SHORTEST = 30
"""Characters of a text that is a reason."""
LINK = re.compile(r"(\]\()(\.\./[^)\s]+)(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made, and the records with their pictures."""
    pages = {
        "troubleshooting.md": _troubleshooting(),
        "reference/settings.md": _settings(),
        "reference/events.md": _events(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "benchmarks/README.md": _benchmarks(),
    }
    for path in sorted(RECORDS.rglob("*.md")):
        pages[path.relative_to(ROOT).as_posix()] = _without_dead_links(path)
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    for path in sorted(RECORDS.glob("*/*.svg")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_kwargs: Any) -> str:
    """Let links that lead out of `docs` lead to copies in the site; in the repository they lead to the originals."""
    depth = page.file.src_uri.count("/")
    if page.file.src_uri.startswith("benchmarks/"):
        return markdown

    def inside(found: re.Match[str]) -> str:
        target = found[2]
        leaves = target.startswith("../" * (depth + 1))
        return f"{found[1]}{target[3:] if leaves else target}{found[3]}"

    return LINK.sub(inside, markdown)


def _benchmarks() -> str:
    """Return how things are measured, with a list of all records in front."""
    lines = [
        "# Benchmarks",
        "",
        "What was found, newest first. Each has its tables, and the commands that repeat it.",
        "",
    ]
    for page in sorted(RECORDS.glob("*/README.md"), reverse=True):
        title = next(line for line in page.read_text(encoding="utf-8").splitlines() if line)
        target = page.relative_to(ROOT / "benchmarks").as_posix()
        lines.append(f"- **{page.parent.name}**: [{title.lstrip('# ')}]({target})")
    method = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    return "\n".join([*lines, "", _only_pages(method.replace("# Benchmarks", "## How it is measured", 1))])


def _without_dead_links(path: Path) -> str:
    return _only_pages(path.read_text(encoding="utf-8"))


def _only_pages(text: str) -> str:
    """Keep the text of links to what is no page or picture, such as an archive of journals."""
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?://|#)(?![^)]*\.(?:md|svg)(?:#[^)]*)?\))[^)]*\)", r"\1", text)


def _settings() -> str:
    """Return the settings by group, from their source."""
    lines = ["# Settings", "", "`egeria.Config` is a frozen dataclass, TOML in and out. These are its groups.", ""]
    lines += ["```python", _EXAMPLE, "```", ""]
    for group in (each for each in _classes(SOURCE / "config.py") if each.name.removesuffix("Config") and each.bases):
        name = group.name.removesuffix("Config").lower()
        lines += [
            f"## {name}",
            "",
            _paragraph(ast.get_docstring(group) or ""),
            "",
            "| setting | default | |",
            "|---|---|---|",
        ]
        for field, value, text in _fields(group):
            default = ast.unparse(value.args[0]) if isinstance(value, ast.Call) else ""
            lines.append(f"| `{name}.{field}` | `{default}` | {_cell(text)} |")
        lines.append("")
    return "\n".join(lines)


_EXAMPLE = '''config = egeria.Config.from_toml("""
[modules]
pattern = 'layer\\\\d'          # cut by a regular expression instead of by structure and size

[plasticity]
interval_steps = 100         # judge every 100 steps; by default derived from total_steps
""")
run = egeria.attach(model, optimizer, scheduler=scheduler, total_steps=steps, config=config)'''


def _events() -> str:
    """Return the kinds of entries of a journal, from their source."""
    lines = [
        "# Events",
        "",
        "A journal is a file of lines, each an event as JSON. `egeria.read_journal` gives these.",
        "",
    ]
    path = SOURCE / "events.py"
    for event in _classes(path):
        kind = next((word.value.value for word in event.keywords if word.arg == "kind"), None)
        if kind is None:
            continue
        lines += [f"## {event.name}", "", f"`{kind}`. {_paragraph(ast.get_docstring(event) or '')}", ""]
        fields = [f"- `{name}` {_paragraph(text)}".rstrip() for name, text in _commented(event, path)]
        lines += [*fields, ""] if fields else []
    return "\n".join(lines)


def _troubleshooting() -> str:
    """Return what may be declined, each with its reasons from the source and the way out from `docs/ways_out.toml`."""
    ways = tomllib.loads(WAYS_OUT.read_text(encoding="utf-8"))
    found = _reasons(ways["reasons_from"])
    if wrong := found.keys() ^ ways["declined"].keys():
        raise PluginError(f"docs/ways_out.toml and what the source may decline differ in {sorted(wrong)}")
    lines = ["# Troubleshooting", "", ways["introduction"].strip(), "", "## What you see", ""]
    for entry in ways["seen"]:
        lines += [f"**{entry['what']}** {_paragraph(entry['way'])}", ""]
    lines += ["## What egeria may decline", "", ways["declines"].strip(), ""]
    ways["declined"] |= ways["also"]
    found |= {what: [] for what in ways["also"]}
    for what in sorted(found):
        lines += [f"### {what[:1].upper()}{what[1:]}", "", _paragraph(ways["declined"][what]), ""]
        lines += [f"> {reason.replace('{}', '…')}\n" for reason in found[what]]
    return "\n".join(lines)


def _reasons(others: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return for all that may be declined the reasons, also those that stand in other files."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    pairs = [pair for tree in trees.values() for pair in _declines(tree)]
    pairs += [
        (what, text) for what, names in others.items() for name in names for text in _refusals(trees[SOURCE / name])
    ]
    found: dict[str, dict[str, None]] = {}
    for what, reason in pairs:
        found.setdefault(what, {})[reason] = None
    return {what: [reason for reason in reasons if reason] for what, reasons in found.items()}


def _declines(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what is declined in a file, and the reason where it stands there."""
    shared = _imported(tree) | _assigned(tree.body) if isinstance(tree, ast.Module) else {}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        names = shared | _assigned(list(ast.walk(function)))
        for node in ast.walk(function):
            is_call = (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decline"
            )
            if is_call and node.args:
                what, reason = (_text(part, names) for part in (*node.args, ast.Constant(""))[:2])
                if len(what) > 1:
                    yield what, reason if len(reason) > SHORTEST else ""


def _refusals(tree: ast.AST) -> Iterator[str]:
    """Yield the reasons that a file gives, by what it returns or raises."""
    names = _assigned(tree.body) if isinstance(tree, ast.Module) else {}
    for node in ast.walk(tree):
        given: list[ast.expr | None] = []
        if isinstance(node, ast.Return):
            given = [node.value]
        elif isinstance(node, ast.Dict):
            given = list(node.keys)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RAISED:
            given = list(node.args)
        for text in (_text(part, names) for part in given if part is not None):
            if len(text) > SHORTEST:
                yield text


def _imported(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the texts that names stand for which a file takes from another of ours."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        path = SOURCE.parent.joinpath(*(node.module or "").split(".")) if isinstance(node, ast.ImportFrom) else None
        if path is not None and path.with_suffix(".py").is_file():
            known = _assigned(ast.parse(path.with_suffix(".py").read_text(encoding="utf-8")).body)
            found |= {entry.name: known[entry.name] for entry in node.names if entry.name in known}
    return found


def _assigned(nodes: list[Any]) -> dict[str, ast.expr]:
    """Return the texts that names stand for."""
    found: dict[str, ast.expr] = {}
    for node in (node for node in nodes if isinstance(node, ast.Assign)):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                found |= {
                    name.id: part
                    for name, part in zip(target.elts, node.value.elts, strict=True)
                    if isinstance(name, ast.Name)
                }
            elif isinstance(target, ast.Name):
                found[target.id] = node.value
    return {name: value for name, value in found.items() if _text(value, {})}


def _text(node: ast.expr, names: dict[str, ast.expr]) -> str:
    """Return a text of the source, with what is put in as an ellipsis; empty for what is not one."""
    if isinstance(node, ast.Name) and node.id in names:
        return _text(names[node.id], {})
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_part(part, names) for part in node.values)
    return ""


def _part(node: ast.expr, names: dict[str, ast.expr]) -> str:
    """Return a part of a text: what is put in, if that is a text itself."""
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, names) or "…"
    return _text(node, names)


def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]


def _fields(group: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None, str]]:
    """Yield the fields of a class, with the text below each."""
    for node, after in zip(group.body, [*group.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield node.target.id, node.value, str(after.value.value) if said else ""


def _commented(group: ast.ClassDef, path: Path) -> Iterator[tuple[str, str]]:
    """Yield the fields of a class, with the comment behind each."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in group.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, lines[node.lineno - 1].partition("  # ")[2]


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _paragraph(text).replace("|", "\\|")
