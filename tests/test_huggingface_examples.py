"""The examples of Trainer run as they are, and as plain training without the lines that egeria needs."""

from __future__ import annotations

import ast
import math
import warnings
from pathlib import Path

import pytest

import egeria
from egeria.events import FaultCaught, RunClosed

pytest.importorskip("transformers", reason="egeria[transformers] is not installed")
pytest.importorskip("accelerate", reason="egeria[transformers] is not installed")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DATA = {
    "text_classification": "sst2",
    "causal_lm": "sst2/train.tsv.xz",
}
QUALITY = {"causal_lm": "eval_loss"}
MARK = "# egeria"


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """The small model, so that a test takes seconds whatever is installed."""
    import text_models  # noqa: PLC0415  (it imports transformers)

    monkeypatch.setattr(text_models, "find_weights", lambda: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*'pin_memory' argument is set as true", category=UserWarning)
        yield


def run(name, folder, *options, plain=False):
    """Run the source of an example, without the marked lines where it is plain; return what `main` returns."""
    lines = (EXAMPLES / f"huggingface_{name}.py").read_text(encoding="utf8").splitlines()
    marked = [line for line in lines if line.endswith(MARK)]
    assert 1 <= len(marked) <= 3
    kept = "\n".join(line for line in lines if not (plain and line.endswith(MARK)))
    names = {"__name__": f"huggingface_{name}"}
    exec(compile(ast.parse(kept), f"huggingface_{name}.py", "exec"), names)
    fixed = ["--output_dir", str(folder), "--use_cpu", "--disable_tqdm", "True", "--max_steps", "6"]
    return names["main"]([*fixed, "--per_device_train_batch_size", "8", *options])


@pytest.mark.parametrize("name", DATA)
def test_an_example_runs_with_and_without_egeria(name, tmp_path):
    quality = QUALITY.get(name, "eval_accuracy")
    watched = run(name, tmp_path / "watched")
    assert run(name, tmp_path / "plain", plain=True)[quality] == watched[quality]
    assert math.isfinite(watched[quality])
    journal = egeria.read_journal(tmp_path / "watched" / "egeria")
    assert [event.step for event in journal.of(RunClosed)] == [6]
    assert journal.of(FaultCaught) == []
    assert not (tmp_path / "plain" / "egeria").exists()


@pytest.mark.parametrize("name", DATA)
def test_an_example_reads_its_data(name, data, tmp_path):
    quality = QUALITY.get(name, "eval_accuracy")
    found = run(name, tmp_path, "--data", str(data / DATA[name]), "--limit", "60")
    assert math.isfinite(found[quality])
