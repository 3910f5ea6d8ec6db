"""What the README shows runs as it stands, and so do the examples and benchmarks."""

import importlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.micro.interleaved import Comparison, compare
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import demo
import egeria
from egeria.events import FaultCaught, MetricLogged, Resumed, RunStarted

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(code, id=f"{page.stem}-{place}")
    for page in PAGES
    for place, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL))
]


class Chain(nn.Module):
    """Three layers, named as in the pattern that is shown."""

    def __init__(self):
        super().__init__()
        self.layer1, self.layer2, self.layer3 = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.layer3(torch.relu(self.layer2(torch.relu(self.layer1(x)))))


def trainer_names(folder):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 8}
    row = {"input_ids": torch.ones(4, dtype=torch.long), "labels": torch.tensor(0)}
    options = {"max_steps": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return {
        "bert": transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=9, **sizes)),
        "arguments": transformers.TrainingArguments(output_dir=str(folder), **options),
        "sentences": [row] * 12,
    }


def lightning_names(model):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _place):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return {"lightning_module": Module(), "quiet": quiet | {"enable_model_summary": False}}


@pytest.mark.filterwarnings("ignore")  # of the frameworks
@pytest.mark.parametrize("code", BLOCKS)
def test_what_the_pages_show_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {
        "egeria": egeria,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12),
        "loader": DataLoader(TensorDataset(torch.ones(12, 4), torch.zeros(12, dtype=torch.long)), batch_size=3),
        "steps": 12,
        "epochs": 3,
        "criterion": nn.functional.cross_entropy,
        "folder": tmp_path / "run",
    }
    if "from transformers" in code:
        names |= trainer_names(tmp_path)
    elif "from lightning" in code:
        names |= lightning_names(model)
    elif "from accelerate" in code:
        pytest.importorskip("accelerate")
    exec(code, names)
    if run := names.get("run"):
        assert run.modules or not run.summary().step  # a page may stop before the first step
        run.close()
    else:
        assert "advice" in names or "trainer" in names


@pytest.mark.bench
def test_interleaved_rounds_take_turns_and_ratios_are_per_round():
    called = []
    result = compare(lambda: called.append("a"), lambda: called.append("b"), rounds=4, warmup=2)
    assert "".join(called) in ("baab" * 3, "abba" * 3)
    assert len(result.first_cpu_s) == len(result.second_wall_s) == 4
    noisy = Comparison([1.0, 10.0, 2.0], [0.5, 5.0, 1.0], [1.0] * 3, [0.25] * 3)
    assert noisy.cpu_ratio() == 0.5 and noisy.wall_ratio() == 0.25


@pytest.mark.slow
def test_the_cifar10_example_trains_and_leaves_a_report(data, tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "cifar10.py"), "--data", str(data / "cifar10")]
    command += ["--samples", "512", "--epochs", "1", "--directory", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"accuracy [\d.]+%  wall [\d.]+ s  cpu [\d.]+ s", last)
    summary = egeria.report(tmp_path / "run").summary
    assert summary.step == 4
    assert summary.metrics


TRAINER = ["--use_cpu", "--disable_tqdm", "True", "--max_steps", "3", "--per_device_train_batch_size", "8"]
EXAMPLES = {
    "huggingface_text_classification": lambda e, out: e["main"]([*TRAINER, "--output_dir", out])["eval_accuracy"],
    "huggingface_causal_lm": lambda e, out: e["main"]([*TRAINER, "--output_dir", out])["eval_loss"],
    "accelerate_images": lambda e, _: e["train"](e["parse"](["--steps", "3"])),
    "accelerate_text_classification": lambda e, _: e["train"](e["parse"](["--steps", "3", "--accumulate", "2"])),
    "lightning_images": lambda e, _: e["train"](e["parse"](["--steps", "21"])),
}


@pytest.mark.filterwarnings("ignore")  # of the frameworks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "text" in name else name for name in EXAMPLES]
)
def test_an_example_of_a_framework_trains_alike_without_its_marked_lines(name, tmp_path, monkeypatch):
    for needed in ("transformers", "lightning", "sklearn"):
        pytest.importorskip(needed)
    accelerate, text_models = pytest.importorskip("accelerate"), importlib.import_module("text_models")
    monkeypatch.setattr(text_models, "find_weights", lambda: None)  # the small model, whatever is installed
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if "minilm" in name else find(name, *_))
    lines = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf8").splitlines()
    plain = [line for line in lines if not line.endswith("# egeria")]
    assert 0 < len(lines) - len(plain) <= 3
    found = []
    for kind, code in (("plain", plain), ("watched", lines)):
        example = {"__name__": name}
        exec(compile("\n".join(code), name, "exec"), example)
        found.append(EXAMPLES[name](example, str(tmp_path / kind)))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert found[0] == found[1] and math.isfinite(found[0])
    [journal] = tmp_path.rglob("journal.jsonl")
    assert egeria.read_journal(journal).of(RunStarted) and not egeria.read_journal(journal).of(FaultCaught)


def start_job(launcher, *arguments):
    command = [sys.executable, *launcher, str(ROOT / "examples" / "cluster" / "train.py"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True, env=environment)
    return [line for line in done.stdout.splitlines() if line.startswith(("epoch", "accuracy"))]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(300)
def test_the_cluster_example_runs_under_python_and_torchrun_and_goes_on_in_either(tmp_path):
    pytest.importorskip("sklearn", reason="the digits ship with scikit-learn")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    checkpoint = ("--checkpoint", tmp_path / "last.pt")
    first = start_job(torchrun, "--epochs", 2, *checkpoint, "--directory", tmp_path / "two")
    assert [line.split()[1] for line in first[:-1]] == ["1", "2"] and first[-1].startswith("accuracy")
    assert egeria.read_journal(tmp_path / "two").of(RunStarted)[0].total_steps == 2 * (1348 // 64)
    later = start_job((), "--epochs", 3, *checkpoint, "--directory", tmp_path / "one")
    assert [line.split()[1] for line in later[:-1]] == ["3"]
    assert egeria.read_journal(tmp_path / "one").of(Resumed)


# --- the demo ---


def run_demo(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, arguments)])
    demo.main()


@pytest.fixture
def few_digits(monkeypatch):
    """Made-up digits in place of scikit-learn's: the demo runs in seconds."""
    generator = torch.Generator().manual_seed(0)

    def some(count):
        images = torch.randn(count, 1, 16, 16, generator=generator)
        return TensorDataset(images, torch.randint(0, 5, (count,), generator=generator))

    given = [(some(128), some(32)) for _ in range(2)]
    monkeypatch.setattr(demo, "load_digits", lambda: given)
    monkeypatch.setattr(demo.pretrain, "__kwdefaults__", {"epochs": 1})


def test_the_demo_compares_plain_training_with_egeria(few_digits, monkeypatch, capsys, tmp_path):
    run_demo(monkeypatch, "--seeds", 1, "--epochs", 4, "--directory", tmp_path / "out")
    output = capsys.readouterr().out
    runs = [line.split() for line in output.splitlines() if line.startswith("  seed 0")]
    assert [line[2] for line in runs] == ["plain", "egeria"] and all("CPU" in line for line in runs)
    assert "frozen at epoch: " in output and "% of the CPU time saved" in output
    assert str(tmp_path / "out" / "seed0" / "report.html") in output
    journal = egeria.read_journal(tmp_path / "out" / "seed0")
    assert journal.num_damaged == 0
    assert [event.step for event in journal.of(MetricLogged)] == [4, 6, 8]
    assert (tmp_path / "out" / "seed0" / "report.html").is_file()
    with pytest.raises(SystemExit):  # an earlier demo is not deleted
        run_demo(monkeypatch, "--seeds", 1, "--epochs", 4, "--directory", tmp_path / "out")
    assert "holds an earlier demo" in capsys.readouterr().err
