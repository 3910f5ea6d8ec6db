"""Accelerate: `run.step(loss)` in every iteration of an unchanged loop, after `accelerator.prepare`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install egeria[accelerate]")

from accelerate import Accelerator  # noqa: E402
from accelerate.tracking import GeneralTracker  # noqa: E402

from egeria import EgeriaWarning, read_journal  # noqa: E402
from egeria.events import (  # noqa: E402
    CacheUsed,
    Declined,
    IntervalMeasured,
    RunClosed,
)
from egeria.integrations.accelerate import attach  # noqa: E402
from loops import differences, outside  # noqa: E402
from ranks import as_by_torchrun, forget_accelerate, run_ranks  # noqa: E402

EPOCHS, BATCHES, BATCH = 4, 5, 6
WATCH = {"freezing": {"tolerance_readings": 10**6}, "plasticity": {"interval_steps": 3}}
FREEZE = {"policy": {"plan": "0.3:1 0.6:2"}, "plasticity": {"interval_steps": 1}}
"""Of 20 steps: one layer module is frozen from the 6th on, two from the 12th."""


class Net(nn.Module):
    """Four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.block() for _ in range(3)))
        self.head = nn.Linear(8, 4)

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))

    def forward(self, inputs):
        return self.head(self.blocks(inputs))


class Loop:
    """A training loop as Accelerate's examples have it, with egeria's two lines where settings are given."""

    def __init__(self, settings: dict[str, Any] | None = None, *, model: Any = Net, fp16: bool = False, **options: Any):
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, **options)
        if fp16:  # what mixed_precision="fp16" does on an accelerator
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.net = model()
        optimizer = torch.optim.SGD([p for p in self.net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
        inputs = torch.randn(BATCHES * BATCH, 8, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(inputs, torch.arange(len(inputs)) % 4), batch_size=BATCH)
        prepared = self.accelerator.prepare(self.net, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared
        accumulation = self.accelerator.gradient_accumulation_steps
        self.steps = -(-len(self.loader) // accumulation) * EPOCHS
        self.before, self.run = outside(self.net), None
        if settings is not None:
            settings = {"total_steps": self.steps, "directory": Path("run"), **settings}
            self.run = attach(self.accelerator, *prepared[:3], prepared[3], **settings)
        self.num_updates = 0

    def batch_loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    def epochs(self, count: int = EPOCHS, begin: int = 0) -> "Loop":
        for _ in range(begin, count):
            self.model.train()
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.batch_loss(batch)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                        self.num_updates += 1
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                if self.run is not None:
                    self.run.step(loss)
        return self

    def end(self) -> dict[str, Any]:
        """Return all that the training has changed."""
        state = {f"model.{name}": tensor.clone() for name, tensor in self.net.state_dict().items()}
        for index, entry in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{index}.{name}": value for name, value in entry.items()}
        return {**state, "rates": self.schedule.get_last_lr(), "random": torch.get_rng_state()}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
    "scaled gradients": {"fp16": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_watching_is_the_loop_alone_bit_for_bit(options):
    plain = Loop(**options).epochs().end()
    forget_accelerate()
    loop = Loop({"config": WATCH}, **options).epochs()
    assert differences(loop.end(), plain) == []
    loop.run.close()
    [closed] = read_journal("run").of(RunClosed)
    assert closed.step == loop.num_updates == loop.steps


@pytest.mark.parametrize("entry", [None, {}, {"schema": 5}, [5]], ids=str)
def test_from_a_damaged_entry_of_a_checkpoint_training_goes_on_and_freezing_begins_anew(entry, tmp_path):
    loop = Loop({"config": WATCH, "plan": "0.1:1", "policy": "plan"}).epochs(1)
    loop.accelerator.save_state(tmp_path)
    torch.save(entry, tmp_path / "custom_checkpoint_0.pkl")
    with pytest.warns(EgeriaWarning, match="it begins anew"):
        loop.accelerator.load_state(tmp_path)
    loop.epochs()
    assert loop.run.frozen == 1
    loop.run.close()


def test_the_loss_of_a_step_is_the_mean_of_its_batches():
    config = {**WATCH, "plasticity": {"interval_steps": 1}}
    loop, batch_losses = Loop({"config": config}, gradient_accumulation_steps=3), list[torch.Tensor]()
    original = loop.batch_loss
    loop.batch_loss = lambda batch: batch_losses.append(original(batch)) or batch_losses[-1]
    loop.epochs(1).run.close()
    first, second = [loss.item() for loss in batch_losses[:3]], [loss.item() for loss in batch_losses[3:]]
    measured = [event.loss for event in read_journal("run").of(IntervalMeasured)]
    assert measured == pytest.approx([sum(first) / 3, sum(second) / 2])


class Tracked(GeneralTracker):
    """Remembers what is logged."""

    name = "tracked"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[dict[str, float], int]] = []

    @property
    def tracker(self):
        return self.logged

    def log(self, values, step=None, **options):
        self.logged.append((values, step))


def test_the_trackers_get_the_scalars_by_optimizer_steps():
    tracker = Tracked()
    loop = Loop({"config": FREEZE}, log_with=tracker, gradient_accumulation_steps=2)
    loop.accelerator.init_trackers("project")
    loop.epochs().run.close()
    given = {"total_steps": 9, "config": FREEZE, "directory": "silent", "log": False}
    loop.run = attach(loop.accelerator, loop.model, loop.optimizer, **given)
    loop.epochs(1).run.close()
    frozen = {step: values["egeria/frozen"] for values, step in tracker.logged}
    assert (frozen[3], frozen[4], frozen[7], frozen[8], frozen[12]) == (0, 1, 1, 2, 2)


@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}], ids=["plain", "bf16"])
def test_the_frozen_front_is_stored_and_served(options, tmp_path):
    computed = Loop({"config": FREEZE, "total_steps": 50}, **options).epochs(10)
    computed.run.close()
    forget_accelerate()
    config = {**FREEZE, "cache": {"enabled": True, "gate": "open"}}
    stored = Loop({"config": config, "total_steps": 50, "directory": tmp_path / "stored"}, **options).epochs(10)
    stored.run.close()
    assert differences(stored.end(), computed.end()) == []
    journal = read_journal(tmp_path / "stored")
    assert not journal.of(Declined) and sum(event.hits for event in journal.of(CacheUsed)) > 0


def train_on_ranks(settings: dict[str, Any] | None, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train to the end."""
    with as_by_torchrun():
        loop = Loop(None if settings is None else {**settings, "directory": folder}, **options)
        assert loop.accelerator.num_processes == 2
        found = {**loop.epochs().end(), "steps": loop.num_updates}
        if loop.run is not None:
            loop.run.close()
        return found


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_two_ranks_watch_without_a_trace(tmp_path):
    options = {"gradient_accumulation_steps": 2}
    plain = run_ranks(train_on_ranks, None, "", options)
    watched = run_ranks(train_on_ranks, {"config": WATCH}, str(tmp_path / "watched"), options)
    for ours, theirs in zip(watched, plain, strict=True):
        assert differences(ours, theirs) == []
