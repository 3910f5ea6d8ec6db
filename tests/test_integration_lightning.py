"""Lightning: one callback in a Trainer that goes on as ever; what cannot be followed is declined with the reason."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: pip install egeria[lightning]")

from lightning.pytorch import callbacks as pl_callbacks  # noqa: E402
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402

from egeria import ConfigError, EgeriaWarning, read_journal  # noqa: E402
from egeria.events import (  # noqa: E402
    CacheUsed,
    Declined,
    ModuleFrozen,
    RunClosed,
    RunStarted,
)
from egeria.integrations.lightning import EgeriaCallback  # noqa: E402
from loops import differences, outside  # noqa: E402
from ranks import as_by_torchrun, run_ranks  # noqa: E402

FRAMEWORK = (
    "ignore:The '.*' does not have many workers:UserWarning",  # of many cores, from where the loader is made
    "ignore:GPU available but not used:UserWarning",
    "ignore:The `srun` command is available:UserWarning:lightning",
    "ignore:.*treespec, LeafSpec.*:FutureWarning:lightning",
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended:UserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
    "ignore:Found .* module\\(s\\) in eval mode at the start of training:UserWarning:lightning",
)
pytestmark = [pytest.mark.filterwarnings(entry) for entry in FRAMEWORK]
EPOCHS, BATCHES, BATCH = 4, 5, 6
WATCH = {
    "freezing": {"tolerance_readings": 10**6},
    "plasticity": {"interval_steps": 3},
    "controller": {"budget_share": 10},
}
FREEZE = {"policy": {"plan": "0.3:1 0.6:2"}, "plasticity": {"interval_steps": 1}}
"""Of 20 steps: one layer module is frozen from the 6th on, two from the 12th."""


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))


class Classifier(pl.LightningModule):
    """One network, called as a whole."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or nn.Sequential(block(), block(), block(), nn.Linear(8, 4))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = functional.cross_entropy(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Fails(pl.Callback):
    """Raises in the middle of the training."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.error = step, error

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise self.error


class Stops(pl.Callback):
    """Ends the training at a step, as a time limit does, and saves a checkpoint there."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def loader(num_batches: int = BATCHES, seed: int = 1) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_batches * BATCH, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.arange(len(inputs)) % 4), batch_size=BATCH)


def trainer_of(*callbacks: Any, **options: Any) -> Any:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    defaults = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, **dict.fromkeys(quiet, False)}
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def fit(*callbacks: Any, model: Any = None, ckpt_path: Any = None, batches: int = BATCHES, **options: Any) -> Any:
    """Train a model from the same start on the same data; return the trainer."""
    torch.manual_seed(0)
    model = Classifier() if model is None else model()
    trainer = trainer_of(*callbacks, **options)
    trainer.fit(model, loader(batches), loader(2, seed=2), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def end_of(trainer: Any) -> dict[str, Any]:
    """Return all that a training has changed."""
    state = {f"model.{name}": tensor for name, tensor in trainer.lightning_module.state_dict().items()}
    for index, entry in trainer.optimizers[0].state_dict()["state"].items():
        state |= {f"optimizer.{index}.{name}": value for name, value in entry.items()}
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {**state, "rates": rates, "step": trainer.global_step, "random": torch.get_rng_state()}


def freezes(directory: Path) -> list[tuple[int, int]]:
    return [(event.step, event.frozen) for event in read_journal(directory).of(ModuleFrozen)]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16-mixed"},
    "accumulation that clips": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_watching_is_the_trainer_alone_bit_for_bit(options, tmp_path):
    plain = end_of(fit(**options))
    assert differences(end_of(fit(EgeriaCallback(config=WATCH, directory=tmp_path), **options)), plain) == []
    [started] = read_journal(tmp_path).of(RunStarted)
    [closed] = read_journal(tmp_path).of(RunClosed)
    assert started.total_steps == closed.step == plain["step"]


def test_a_checkpoint_of_a_training_without_egeria_is_gone_on_from(tmp_path):
    stopped = Stops(10, tmp_path / "last.ckpt")
    fit(stopped)
    fit(EgeriaCallback(config=FREEZE, directory=tmp_path / "run"), ckpt_path=stopped.path)
    assert read_journal(tmp_path / "run").of(RunStarted)[0].total_steps == 10
    assert freezes(tmp_path / "run") == [(3, 1), (6, 2)]


DAMAGED = {
    "a list": [5],
    "a number": torch.tensor(5),
    "no run": {"first_step": 0},
    "no state": {"run": [], "first_step": 0},
}
DAMAGED |= {f"step {step}": {"first_step": step} for step in (10**9, -5, "x", None)}


@pytest.mark.parametrize("damage", DAMAGED)
def test_from_a_damaged_entry_of_a_checkpoint_training_goes_on_and_freezing_begins_anew(damage, tmp_path):
    stopped = Stops(10, tmp_path / "last.ckpt")
    fit(EgeriaCallback(config=FREEZE, directory=tmp_path / "first"), stopped)
    saved = torch.load(stopped.path, weights_only=True)
    [(name, entry)] = [(key, value) for key, value in saved["callbacks"].items() if "Egeria" in key]
    saved["callbacks"][name] = entry | DAMAGED[damage] if damage.startswith("step") else DAMAGED[damage]
    assert entry["first_step"] == 0
    torch.save(saved, stopped.path)
    with pytest.warns(EgeriaWarning, match="it begins anew") as said:
        trainer = fit(EgeriaCallback(config=FREEZE, directory=tmp_path / "run"), ckpt_path=stopped.path)
    assert trainer.global_step == 20 and freezes(tmp_path / "run") == [(3, 1), (6, 2)]
    assert len([entry for entry in said if "it begins anew" in str(entry.message)]) == 1


class Parts(Classifier):
    """Two parts that `training_step` calls one by one."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(block(), block(), block(), nn.Linear(8, 8)))
        self.head = nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.head(self.net(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        pass


class Whole(Parts):
    """Two parts behind a forward of its own."""

    def forward(self, inputs):
        return self.head(self.net(inputs))

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("name", [None, "net"])
@pytest.mark.parametrize("model", [Whole, Parts])
def test_a_module_of_parts_is_followed_however_it_calls_them(model, name, tmp_path):
    fit(EgeriaCallback(name, config=FREEZE, directory=tmp_path), model=model)
    assert freezes(tmp_path) == [(6, 1), (12, 2)]
    names = [entry["name"] for entry in read_journal(tmp_path).of(RunStarted)[0].modules]
    assert any("head" in entry for entry in names) == (name is None)


def test_names_and_settings_outside_their_contract_are_errors():
    with pytest.raises(ConfigError, match=r"found 'nett'.*'net', 'head'"):
        fit(EgeriaCallback("nett"), model=Parts)
    with pytest.raises(ConfigError, match="names a submodule, found Linear"):
        EgeriaCallback(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="windo"):
        EgeriaCallback(config={"plasticity": {"windo": 3}})
    with pytest.raises(ConfigError, match=r"policy\.name"):
        EgeriaCallback(policy="no such policy")


class Manual(Classifier):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class DeepSpeedStrategy(SingleDeviceStrategy):
    """By its name one of those that egeria does not follow."""


DECLINED: dict[str, Any] = {
    "SWA": (Classifier, [lambda: pl_callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)], "averages"),
    "accumulation": (
        Classifier,
        [lambda: pl_callbacks.GradientAccumulationScheduler({0: 1, 2: 2})],
        "changes the number",
    ),
    "manual": (Manual, [], "optimizes manually"),
    "strategy": (Classifier, [], "DeepSpeedStrategy is not followed"),
}


@pytest.mark.parametrize("case", DECLINED)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*provided params to be frozen already exist:UserWarning:lightning")
@pytest.mark.filterwarnings("ignore:The provided params to be frozen:UserWarning")
@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch:UserWarning")
@pytest.mark.filterwarnings("ignore:Swapping scheduler:UserWarning")
def test_what_cannot_be_followed_is_declined_with_one_warning(case, tmp_path):
    model, callbacks, reason = DECLINED[case]
    options = {"strategy": DeepSpeedStrategy("cpu")} if case == "strategy" else {}
    plain = end_of(fit(*[make() for make in callbacks], model=model, **options))
    options = {"strategy": DeepSpeedStrategy("cpu")} if case == "strategy" else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback = EgeriaCallback(config=FREEZE, directory=tmp_path)
        trainer = fit(*[make() for make in callbacks], callback, model=model, **options)
    [said] = [str(entry.message) for entry in caught if issubclass(entry.category, EgeriaWarning)]
    assert reason in said and not list(tmp_path.iterdir())
    assert differences(end_of(trainer), plain) == []


class Endless(IterableDataset):
    """Has no length."""

    def __iter__(self):
        return iter([(torch.randn(8), index % 4) for index in range(BATCHES * BATCH)])


def test_a_loader_without_a_length_is_told_what_gives_the_training_one(tmp_path):
    def train(folder: str, **options: Any) -> None:
        callback = EgeriaCallback(config=FREEZE, directory=tmp_path / folder)
        trainer_of(callback, **options).fit(Classifier(), DataLoader(Endless(), batch_size=BATCH), loader(2))

    with pytest.warns(
        EgeriaWarning, match=r"unknown\. Give Trainer\(max_steps=\.\.\.\), or limit_train_batches as a n"
    ):
        train("declined")
    train("steps", max_steps=20)
    train("limited", limit_train_batches=BATCHES)
    assert freezes(tmp_path / "steps") == freezes(tmp_path / "limited") == [(6, 1), (12, 2)]


def test_a_fast_development_run_leaves_nothing_behind(tmp_path):
    fit(EgeriaCallback(), fast_dev_run=2)
    assert not list(tmp_path.rglob("*.jsonl")) and not (tmp_path / "egeria_runs").exists()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["crash", "Ctrl-C"])
def test_a_crash_leaves_the_model_as_it_was_found(error, tmp_path):
    model = Classifier()
    before = outside(model.net)
    callback = EgeriaCallback(config=FREEZE, directory=tmp_path)
    with pytest.raises((RuntimeError, SystemExit)):
        fit(callback, Fails(14, error), model=lambda: model)
    assert freezes(tmp_path) == [(6, 1), (12, 2)] and callback.run.summary().closed
    found, expected = outside(model.net), before
    found.pop("modes"), expected.pop("modes")  # those of the training, in which it stopped
    assert found == expected and model.training


class Silent(Classifier):
    """Logs nothing in training, for `self.log` cannot be compiled."""

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.net(batch[0]), batch[1])


class Net(nn.Module):
    """A network with a forward of its own, which torch.compile takes hooks of the model out of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(block() for _ in range(3)), nn.Linear(8, 4)

    def forward(self, inputs):
        for part in self.blocks:
            inputs = part(inputs)
        return self.head(inputs)


@pytest.mark.parametrize("way", ["in place", "wrapped", "the whole module"])
def test_a_compiled_model_freezes(way, tmp_path, monkeypatch):
    torch.compiler.reset()
    # No freeze of a model this small repays compiling it anew.
    monkeypatch.setattr("egeria.model.compile.Compilation.repays", lambda *_: None)

    def compiled():
        model = Silent(Net())
        if way == "in place":
            model.net.compile(backend="eager")
        elif way == "wrapped":
            model.net = torch.compile(model.net, backend="eager")
        return torch.compile(model, backend="eager") if way == "the whole module" else model

    assert fit(EgeriaCallback(config=FREEZE, directory=tmp_path), model=compiled).global_step == 20
    assert freezes(tmp_path) == [(6, 1), (12, 2)]


def test_the_frozen_front_is_stored_and_served(tmp_path):
    computed = end_of(fit(EgeriaCallback(config=FREEZE, directory=tmp_path / "computed"), max_epochs=10))
    config = {**FREEZE, "cache": {"enabled": True, "gate": "open"}}
    stored = end_of(fit(EgeriaCallback(config=config, directory=tmp_path / "stored"), max_epochs=10))
    assert differences(stored, computed) == []
    journal = read_journal(tmp_path / "stored")
    assert not journal.of(Declined) and sum(event.hits for event in journal.of(CacheUsed)) > 0


def fit_on_ranks(folder: str, config: dict[str, Any] | None, options: dict[str, Any]) -> dict[str, Any]:
    """Train in a process of a job that was started as by torchrun."""
    ours = [] if config is None else [EgeriaCallback(config=config, directory=folder)]
    strategy = pl.strategies.DDPStrategy(process_group_backend="gloo")
    with as_by_torchrun():
        return end_of(fit(*ours, strategy=strategy, devices=2, batches=2 * BATCHES, **options))


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_two_ranks_watch_without_a_trace(tmp_path):
    options = {"accumulate_grad_batches": 2}
    plain = run_ranks(fit_on_ranks, "", None, options)
    watched = run_ranks(fit_on_ranks, str(tmp_path / "watched"), WATCH, options)
    for ours, theirs in zip(watched, plain, strict=True):
        assert differences(ours, theirs) == []
