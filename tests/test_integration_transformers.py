"""Trainer with `callbacks=[EgeriaCallback()]` and nothing else."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import egeria
from egeria.events import CacheUsed, Declined, FaultCaught, IntervalMeasured, Resumed, RunClosed, RunStarted
from egeria.session import EgeriaWarning
from loops import FAST, outside
from ranks import as_by_torchrun, run_ranks

transformers = pytest.importorskip("transformers", reason="egeria[transformers] is not installed")
pytest.importorskip("accelerate", reason="egeria[transformers] is not installed")
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed  # noqa: E402

from egeria.integrations.transformers import STATE_FILE, EgeriaCallback  # noqa: E402

INLINE = {"controller": {"kind": "inline", "budget_share": 1000.0}}
WATCH = {**INLINE, "plasticity": {"interval_steps": 2}, "freezing": {"tolerance_readings": 10**6}}
FREEZE = {**INLINE, "plasticity": {"interval_steps": 2}, "policy": {"plan": "0.25:1 0.5:2"}}
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


STEADY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


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
        callbacks=[*([callback] if callback else []), *callbacks],
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


KINDS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 3},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 4},
}
SLOW = ("smoothing", "bf16", "evaluation")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SLOW)) for kind in KINDS])
def test_without_a_freeze_it_is_plain_training_bit_for_bit(kind, tmp_path):
    plain = trainer(tmp_path / "plain", **KINDS[kind])
    plain.train()
    state = torch.get_rng_state()
    watched, _, frozen = train_watched(tmp_path / "watched", WATCH, **KINDS[kind])
    assert torch.equal(torch.get_rng_state(), state)
    assert set(frozen.values()) == {0}
    assert_equal(watched, plain)
    assert assert_clean(tmp_path / "watched" / "egeria").of(RunStarted)[0].total_steps == 16


def test_the_loss_of_a_step_is_what_trainer_logs(tmp_path):
    trained, _, _ = train_watched(tmp_path, WATCH, **KINDS["smoothing"])
    measured = [event.loss for event in assert_clean(tmp_path / "egeria").of(IntervalMeasured)]
    entries = losses(trained)
    assert measured == pytest.approx(
        [sum(pair) / 2 for pair in zip(entries[::2], entries[1::2], strict=True)], abs=1e-5
    )


def test_entries_of_the_log_have_the_numbers_of_egeria_too(tmp_path):
    plain = trainer(tmp_path / "plain", logging_steps=4)
    plain.train()
    trained, _, _ = train_watched(tmp_path / "watched", FREEZE, logging_steps=4)
    history = [{key for key in entry if not key.startswith("egeria/")} for entry in trained.state.log_history]
    assert history == [set(entry) for entry in plain.state.log_history]
    frozen = [entry["egeria/frozen"] for entry in trained.state.log_history]
    assert frozen == [1, 2, 2, 2, 2]
    silent = trainer(tmp_path / "silent", EgeriaCallback(FREEZE, log=False), logging_steps=4)
    silent.train()
    assert not [key for entry in silent.state.log_history for key in entry if key.startswith("egeria/")]


def stop(error):
    def raise_it(model):
        raise error

    return raise_it


@pytest.mark.parametrize("error", [RuntimeError("an error of the loop"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_an_error_leaves_the_model_as_a_plain_trainer_does(error, tmp_path):
    plain = trainer(tmp_path / "plain", callbacks=[Watch(None, at=10, do=stop(error))])
    with pytest.raises(type(error)):
        plain.train()
    callback = EgeriaCallback(FREEZE)
    watch = Watch(callback, at=10, do=stop(error))
    trained = trainer(tmp_path / "watched", callback, callbacks=[watch])
    before = set(vars(trained))
    with pytest.raises(type(error)):
        trained.train()
    assert watch.frozen[10] == 2
    assert callback.run is None
    assert outside(trained.model) == outside(plain.model)
    assert set(vars(trained)) - before == set(vars(plain)) - before
    assert egeria.read_journal(tmp_path / "watched" / "egeria").of(RunClosed)
    trained.callback_handler.remove_callback(Watch)
    trained.train()
    assert egeria.read_journal(tmp_path / "watched" / "egeria-2").of(RunClosed)[0].step == 16


def resumed(folder, callback, step=10, **changes):
    watch = Watch(callback)
    trained = trainer(folder, callback, callbacks=[watch], save_strategy="steps", save_steps=5, **changes)
    trained.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{step}"))
    return trained, watch.frozen


@pytest.mark.parametrize("config", [FREEZE, JUDGE], ids=["static", "egeria"])
def test_a_resumed_training_equals_an_uninterrupted_one(config, tmp_path):
    step = 10
    whole, _, frozen = train_watched(tmp_path, config, save_strategy="steps", save_steps=5, max_steps=20)
    assert frozen[20] > 0
    last, again = resumed(tmp_path, EgeriaCallback(config), step=step, max_steps=20)
    assert again == {count: depth for count, depth in frozen.items() if count > step}
    assert_equal(last, whole)
    assert [event.step for event in assert_clean(tmp_path / "egeria").of(Resumed)] == [step]
    assert not (tmp_path / "egeria-2").exists()


DAMAGED = {
    "missing": None,
    "text": b"not a state",
    "other policy": "linear",
    "no dictionary": [5],
    "no run": {},
    "no state": 5,
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_without_a_state_that_fits_a_resumed_training_begins_anew_with_a_warning(damage, tmp_path):
    train_watched(tmp_path, FREEZE, save_strategy="steps", save_steps=5)
    path = tmp_path / "checkpoint-5" / STATE_FILE
    saved = torch.load(path, weights_only=True)
    if damage is None:
        path.unlink()
    elif isinstance(damage, bytes):
        path.write_bytes(damage)
    elif isinstance(damage, list | dict):
        torch.save(damage, path)
    else:
        saved["run"] = {**saved["run"], "policy_name": damage} if isinstance(damage, str) else damage
        torch.save({**saved, "journal": "../../elsewhere"}, path)
    with pytest.warns(EgeriaWarning, match="it begins anew"):
        trained, frozen = resumed(tmp_path, EgeriaCallback(FREEZE), step=5)
    assert trained.state.global_step == 16 and frozen[16] == 2
    assert egeria.read_journal(tmp_path / "egeria-2").of(RunStarted)[0].total_steps == 11
    assert not (tmp_path.parent.parent / "elsewhere").exists()


def test_a_fault_of_ours_does_not_stop_the_trainer(tmp_path, monkeypatch):
    plain = trainer(tmp_path / "plain")
    plain.train()
    monkeypatch.setattr(egeria, "attach", lambda *args, **kwargs: 1 / 0)
    with pytest.warns(EgeriaWarning, match="attaching under Trainer failed"):
        trained, callback, _ = train_watched(tmp_path / "watched", FREEZE)
    assert callback.run is None
    assert_equal(trained, plain)


def test_a_wrong_setting_is_an_error_at_once():
    with pytest.raises(egeria.ConfigError, match=r"policy\.name"):
        EgeriaCallback(policy="no such policy")


class OwnLoop(Trainer):
    def _inner_training_loop(self, *args, **kwargs):
        self.callback_handler.on_train_begin(self.args, self.state, self.control)


def test_what_cannot_be_followed_is_declined_with_the_reason(tmp_path):
    with pytest.warns(EgeriaWarning, match="freezing: the trainer has a training loop of its own"):
        trainer(tmp_path, EgeriaCallback(FREEZE), kind=OwnLoop).train()
    trained = trainer(tmp_path, EgeriaCallback(FREEZE))
    trained.args._n_gpu = 2
    with pytest.warns(EgeriaWarning, match="freezing: DataParallel copies the model"):
        trained.train()
    assert trained.state.global_step == 16


def train_in_ranks(folder, config, changes):
    """Train in this process of a job as torchrun starts it; return losses, depths, weights and what was declined."""
    callback = EgeriaCallback(config) if config else None
    watch = Watch(callback)
    with as_by_torchrun():
        trained = trainer(folder, callback, callbacks=[watch], ddp_backend="gloo", **changes)
        trained.train()
        assert "fsdp" in changes or isinstance(trained.model_wrapped, nn.parallel.DistributedDataParallel)
    weights = {name: value.numpy() for name, value in trained.model.state_dict().items()}
    return losses(trained), watch.frozen, weights, all(p.requires_grad for p in trained.model.parameters())


def ranks(folder, config, **changes):
    return run_ranks(train_in_ranks, str(folder), config, changes)


@pytest.mark.dist
@pytest.mark.parametrize(
    "changes", [{}, pytest.param(KINDS["accumulation"], marks=pytest.mark.slow)], ids=["plain", "accumulation"]
)
def test_two_ranks_train_as_without_it_and_freeze_alike(changes, tmp_path):
    plain, watched = ranks(tmp_path / "plain", None, **changes), ranks(tmp_path / "watched", WATCH, **changes)
    for mine, theirs in zip(watched, plain, strict=True):
        assert mine[0] == theirs[0]
        assert all((mine[2][name] == value).all() for name, value in theirs[2].items())
    assert_clean(tmp_path / "watched" / "egeria")
    first, second = ranks(tmp_path, FREEZE, **changes)
    assert first[1] == second[1]
    assert (first[1][3], first[1][4], first[1][16]) == (0, 1, 2)
    assert all((first[2][name] == value).all() for name, value in second[2].items())
    assert first[3] and second[3]
    assert_clean(tmp_path / "egeria")


@pytest.mark.dist
def test_fsdp2_by_the_arguments_of_trainer_follows_a_plan(tmp_path):
    wraps = {"transformer_layer_cls_to_wrap": ["BertLayer"], "fsdp_version": 2}
    first, second = ranks(tmp_path, FREEZE, fsdp="full_shard auto_wrap", fsdp_config=wraps)
    assert first[1] == second[1] and (first[1][3], first[1][4], first[1][16]) == (0, 1, 2)
    assert_clean(tmp_path / "egeria")


def test_the_cache_serves_what_trainer_fetches_ahead(tmp_path):
    steps = 2
    config = {**FREEZE, "policy": {"plan": "0.2:2"}, "cache": {"enabled": True, "gate": "open"}}
    epochs = {"max_steps": -1, "num_train_epochs": 8, "gradient_accumulation_steps": steps}
    set_seed(0)
    plain, _, _ = train_watched(tmp_path / "plain", {**config, "cache": {}}, model=bert(**STEADY), **epochs)
    set_seed(0)
    trained, _, frozen = train_watched(tmp_path / "cached", config, model=bert(**STEADY), **epochs)
    used = assert_clean(tmp_path / "cached" / "egeria").of(CacheUsed)
    assert frozen[128 // steps] == 2
    assert sum(event.hits for event in used) > 64
    assert losses(trained) == pytest.approx(losses(plain), abs=1e-6)
