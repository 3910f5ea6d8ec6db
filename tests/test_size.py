"""`scripts/size.py`: the tree is counted as git tracks it, and fails over its limits."""

import subprocess

from scripts.size import main

GROUP = '''
class Cache(SettingsGroup):
    """Settings."""

    enabled: bool = True
    share: float = 0.5
'''
LONG = 'def long():\n    """First line.\n\n    Last line.\n    """\n' + "    print()\n" * 45


def made(folder, limits):
    """Write a small tree with these limits, and have git track it."""
    text = "[tool.egeria.limits]\n" + "\n".join(f"{name} = {limit}" for name, limit in limits.items())
    contents = {
        "pyproject.toml": text,
        "src/egeria/__init__.py": "import ast\n",
        "src/egeria/config/groups.py": GROUP,
        "src/egeria/config/page.html": "<p>\n",
        "tests/test_a.py": LONG,
        "benchmarks/records/0001/runs.tar.xz": "",
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    (folder / "src/egeria/untracked.py").write_text("import ast\n" * 100, encoding="utf-8")


def test_the_tree_is_counted_by_package_and_no_limit_is_exceeded(tmp_path, capsys):
    limits = {"library_statements": 5, "library_settings": 2, "library_files": 2, "tests_lines": 50, "tracked_files": 5}
    made(tmp_path, limits)
    assert main(tmp_path) == 0
    rows = {line.split("  ")[0]: line.split()[-5:] for line in capsys.readouterr().out.splitlines()}
    assert rows["(top)"] == ["1", "1", "1", "0", "0"] and rows["config"] == ["1", "6", "4", "2", "0"]
    assert rows["egeria"] == ["2", "7", "5", "2", "0"]


def test_one_over_a_limit_fails_and_is_named(tmp_path, capsys):
    made(tmp_path, {"library_statements": 4, "library_lines": 7})
    assert main(tmp_path) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" over")]
    assert line.startswith("library statements") and line.endswith("1 over")
