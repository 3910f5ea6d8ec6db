"""Trainer with `callbacks=[EgeriaCallback()]` and nothing else."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from torch import nn

import egeria
from egeria.events import Declined, FaultCaught, ModuleFrozen, Resumed, RunClosed, RunStarted
from egeria.session import EgeriaWarning
from loops import FAST, outside

transformers = pytest.importorskip("transformers", reason="egeria[transformers] is not installed")
pytest.importorskip("accelerate", reason="egeria[transformers] is not installed")
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed  # noqa: E402

from egeria.integrations.transformers import STATE_FILE, EgeriaCallback  # noqa: E402

INLINE = {"controller": {"kind": "inline", "budget_share": 1000.0}}
WATCH = {**INLINE, "plasticity": {"interval_steps": 2}, "freezing": {"enabled": False}}
FREEZE = {
    **INLINE,
    "plasticity": {"interval_steps": 2},
    "policy": {"name": "static", "schedule": "0.25:1 0.5:2"},
}
JUDGE = {**FAST, **INLINE, "freezing": {"tolerance_share": 5.0}}
"""Freezes by what it reads from the reference model."""


@pytest.fixture(autouse=True)
def _quietly(monkeypatch):
    """What the frameworks themselves are about to change is not ours to see."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        for module in ("transformers", "accelerate", "peft", "trl", "sentence_transformers", "datasets"):
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=module)
            warnings.filterwarnings("ignore", category=FutureWarning, module=module)
        warnings.filterwarnings("ignore", message=".*'pin_memory' argument is set as true", category=UserWarning)
        yield


def bert(**changes):
    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**shape, intermediate_size=32, num_labels=3, **changes)
    )


def sentences(count=64, **more):
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(1, 50, (8,), generator=generator) for _ in range(count)]
    return [{"input_ids": entry, "labels": entry.sum() % 3} for entry in words]


def arguments(folder, make=TrainingArguments, **changes):
    ours = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "max_steps": 16,
    }
    return make(**{**ours, **changes})


def trainer(folder, callback=None, *, model=None, kind=Trainer, callbacks=(), **changes):
    """Return a trainer; the same seed sees the same weights, data and random numbers."""
    set_seed(0)
    return kind(
        model=bert() if model is None else model,
        args=arguments(folder, **changes),
        train_dataset=sentences(),
        eval_dataset=sentences(8),
        callbacks=[*callbacks, *([callback] if callback else [])],
    )


class Watch(TrainerCallback):
    """Notes how many layer modules were frozen after each step, and does something at one of them."""

    def __init__(self, callback, at=None, do=None):
        self.callback, self.at, self.do, self.frozen = callback, at, do, {}

    def on_step_end(self, args, state, control, **kwargs):
        if self.callback and self.callback.run:
            self.frozen[state.global_step] = self.callback.run.frozen
        if state.global_step == self.at:
            self.do(kwargs["model"])


def losses(trained):
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def assert_equal(first, second):
    assert losses(first) == losses(second)
    theirs = second.model.state_dict()
    assert not [name for name, value in first.model.state_dict().items() if not torch.equal(value, theirs[name])]


def assert_clean(folder):
    journal = egeria.read_journal(folder)
    assert journal.of(FaultCaught) == []
    assert journal.of(Declined) == []
    return journal


def train_watched(folder, config, **options):
    """Train with a callback; return trainer, callback and frozen depths by step."""
    callback = EgeriaCallback(config)
    watch = Watch(callback)
    trained = trainer(folder, callback, callbacks=[watch], **options)
    trained.train()
    return trained, callback, watch.frozen


def random_state():
    return torch.get_rng_state()


KINDS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 3},
    "bf16": {"bf16": True},
    "compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 4},
}
each_kind = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)


@each_kind
def test_without_a_freeze_it_is_plain_training_bit_for_bit(changes, tmp_path):
    plain = trainer(tmp_path / "plain", **changes)
    plain.train()
    state = random_state()
    watched, _, frozen = train_watched(tmp_path / "watched", WATCH, **changes)
    assert torch.equal(random_state(), state)
    assert set(frozen.values()) == {0}
    assert_equal(watched, plain)
    assert [entry for entry in assert_clean(tmp_path / "watched" / "egeria").of(RunStarted)][0].total_steps == 16


@each_kind
def test_the_front_freezes(changes, tmp_path):
    trained, callback, frozen = train_watched(tmp_path, FREEZE, **changes)
    assert (frozen[3], frozen[4], frozen[8], frozen[16]) == (0, 1, 2, 2)
    journal = assert_clean(tmp_path / "egeria")
    assert [event.step for event in journal.of(ModuleFrozen)] == [4, 8]
    assert callback.run is None and callback.report.is_file()
    assert all(parameter.requires_grad for parameter in trained.model.parameters())


def test_frozen_weights_stay_as_they_are(tmp_path):
    kept = {}

    def keep(model):
        names = {name for module in callback.run.modules[:1] for name in module.parameters}
        kept.update({name: model.get_parameter(name).detach().clone() for name in names})

    callback = EgeriaCallback(FREEZE)
    trained = trainer(tmp_path, callback, callbacks=[Watch(callback, at=5, do=keep)])
    trained.train()
    assert kept
    assert all(torch.equal(trained.model.get_parameter(name), value) for name, value in kept.items())


@pytest.mark.parametrize("changes", [KINDS["accumulation"], KINDS["smoothing"]], ids=["accumulation", "smoothing"])
def test_the_loss_of_a_step_is_what_trainer_logs(changes, tmp_path):
    class Losses(EgeriaCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(float(sum(self._losses)))
            super().on_step_end(args, state, control, **kwargs)

    seen = []
    trained = trainer(tmp_path, Losses(WATCH), **changes)
    trained.train()
    assert seen == pytest.approx(losses(trained), abs=1e-6)
