"""A plan that begins frozen, under Trainer, Accelerate and Lightning: to the bit what freezing by hand does there."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import egeria
from egeria.events import Declined, FaultCaught, ModuleFrozen, Resumed, Thawed
from laws.support import differences
from ranks import as_by_torchrun, forget_accelerate, run_ranks

transformers = pytest.importorskip("transformers", reason="egeria[transformers] is not installed")
accelerate = pytest.importorskip("accelerate", reason="egeria[accelerate] is not installed")
pl = pytest.importorskip("lightning.pytorch", reason="egeria[lightning] is not installed")
from lightning.pytorch import callbacks as pl_callbacks  # noqa: E402

from egeria.integrations import accelerate as egeria_accelerate  # noqa: E402
from egeria.integrations import lightning as egeria_lightning  # noqa: E402
from egeria.integrations import transformers as egeria_transformers  # noqa: E402

PLAN, PATTERN = "0:20 0.25:0 0.6:2", r"blocks\.\d|head"
CONFIG = {"policy": {"plan": PLAN}, "modules": {"pattern": PATTERN}, "cache": {"enabled": False}}
EPOCHS, BATCHES, BATCH, WIDTH = 5, 4, 6, 8
STOPS = (1, 2)
"""Epochs behind which a training is stopped: in the frozen phase, and in the thawed one."""
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:accelerate"),
]


class Net(nn.Module):
    """Four layer modules; `freeze` does by hand what a plan does."""

    still = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(map(self.block, range(3))), nn.Linear(WIDTH, 4)

    @staticmethod
    def block(_: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.2))

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x)
        return {"loss": functional.cross_entropy(self.head(x), labels)}

    def train(self, mode: bool = True) -> "Net":
        super().train(mode)
        for block in self.blocks[: self.still]:
            block.eval()
        return self

    def freeze(self, depth: int) -> None:
        self.still = depth
        for index, block in enumerate(self.blocks):
            for parameter in block.parameters():
                parameter.requires_grad_(index >= depth)
                parameter.grad = parameter.grad if index >= depth else None
        self.train(self.training)


def depth_at(step: int, total: int) -> int:
    """Return what the plan freezes once so many steps are done."""
    return 3 if step < math.ceil(0.25 * total) else 0 if step < math.ceil(0.6 * total) else 2


def new_net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows() -> list[dict[str, torch.Tensor]]:
    x = torch.randn(BATCHES * BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    return [{"x": entry, "labels": torch.tensor(index % 4)} for index, entry in enumerate(x)]


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def end_of(net, optimizer) -> dict:
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()["state"], "random": torch.get_rng_state()}


def assert_follows(folder, total: int, epochs=STOPS) -> None:
    """Check that the runs in a journal had the moves of the plan at their steps, and that nothing went wrong."""
    journal = egeria.read_journal(folder)
    moves = {event.step: getattr(event, "frozen", 0) for event in journal.of((ModuleFrozen, Thawed))}
    assert moves == {step: depth_at(step, total) for step in (0, math.ceil(0.25 * total), math.ceil(0.6 * total))}
    assert [event.step for event in journal.of(Resumed)] == [epoch * total // EPOCHS for epoch in epochs]
    assert not journal.of((Declined, FaultCaught))


# --- Trainer ---------------------------------------------------------------------------------------------------------


class TrainerByHand(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **_):
        if state.global_step == 0:
            model.freeze(depth_at(0, state.max_steps))

    def on_step_end(self, args, state, control, model, **_):
        model.freeze(depth_at(state.global_step, state.max_steps))


def by_trainer(folder, callback, *, epoch=0, **options):
    net = new_net()
    arguments = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "epoch",
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        **options,
    }
    trainer = transformers.Trainer(
        model=net,
        args=transformers.TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=rows(),
        eval_dataset=rows()[:BATCH],
        optimizers=(sgd(net.parameters()), None),
        callbacks=[callback],
    )
    steps = BATCHES // trainer.args.gradient_accumulation_steps // trainer.args.world_size
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{epoch * steps}") if epoch else None)
    return end_of(net, trainer.optimizer), trainer.state.max_steps


KINDS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "bf16, evaluated first": {"bf16": True, "eval_on_start": True, "eval_strategy": "epoch"},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "compiled by aot_eager": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}
SLOW = pytest.param("compiled by aot_eager", marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", [*list(KINDS)[:-1], SLOW])
def test_trainer(kind, tmp_path, monkeypatch):
    options = KINDS[kind]
    monkeypatch.setattr("egeria.model.compile.Compilation.repays", lambda *_: None)  # a model so small never does
    torch.compiler.reset()
    by_hand, total = by_trainer(tmp_path / "by hand", TrainerByHand(), **options)
    ours, _ = by_trainer(tmp_path / "ours", egeria_transformers.EgeriaCallback(CONFIG), **options)
    assert differences(by_hand, ours) == []
    stops = () if "torch_compile" in options else STOPS
    for epoch in stops:
        callback = egeria_transformers.EgeriaCallback(CONFIG)
        assert differences(by_hand, by_trainer(tmp_path / "ours", callback, epoch=epoch, **options)[0]) == []
    assert_follows(tmp_path / "ours" / "egeria", total, stops)


class StopsEarly(egeria_transformers.EgeriaCallback):
    """Ends the training in the thawed phase, as early stopping does."""

    def on_step_end(self, args, state, control, **more):
        super().on_step_end(args, state, control, **more)
        control.should_training_stop = state.global_step == 8


def test_a_trainer_that_stops_early_has_done_the_part_of_the_plan_up_to_there(tmp_path):
    by_trainer(tmp_path, callback := StopsEarly(CONFIG))
    made = egeria.report(tmp_path / "egeria")
    assert [point.frozen for point in made.summary.depths if point.num_steps] == [3, 0] and callback.run is None
    assert (made.summary.step, made.summary.total_steps) == (8, 20) and "8 of the 20 steps" in str(made)


# --- Accelerate ------------------------------------------------------------------------------------------------------


class AccelerateByHand:
    """Takes the place of a run."""

    def __init__(self, accelerator, net, optimizer, total: int) -> None:
        self.accelerator, self.net, self.total, self.num_steps = accelerator, net, total, 0
        optimizer.optimizer.register_step_pre_hook(self.begin)

    def begin(self, *_) -> None:
        if self.num_steps == 0:
            self.net.freeze(depth_at(0, self.total))

    def step(self, _) -> None:
        if self.accelerator.sync_gradients:
            self.num_steps += 1
            self.net.freeze(depth_at(self.num_steps, self.total))

    def close(self) -> None:
        pass


def by_accelerate(folder, *, is_ours, accumulation, epoch=0):
    forget_accelerate()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    net, total = new_net(), EPOCHS * BATCHES // accumulation // accelerator.num_processes
    model, optimizer, loader = accelerator.prepare(net, sgd(net.parameters()), DataLoader(rows(), batch_size=BATCH))
    if is_ours:
        given = {"total_steps": total, "config": CONFIG, "directory": folder / "run"}
        run = egeria_accelerate.attach(accelerator, model, optimizer, loader, **given)
    else:
        run = AccelerateByHand(accelerator, net, optimizer, total)
    if epoch:
        accelerator.load_state(folder / f"state {epoch}")
    for number in range(epoch, EPOCHS):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            run.step(loss)
        if is_ours and not epoch and number + 1 in STOPS:
            accelerator.save_state(folder / f"state {number + 1}")
    run.close()
    return end_of(net, optimizer)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_accelerate(accumulation, tmp_path):
    by_hand = by_accelerate(tmp_path, is_ours=False, accumulation=accumulation)
    for epoch in (0, *STOPS):
        assert differences(by_hand, by_accelerate(tmp_path, is_ours=True, accumulation=accumulation, epoch=epoch)) == []
    assert_follows(tmp_path / "run", EPOCHS * BATCHES // accumulation)


# --- Lightning -------------------------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    """Begins its random numbers anew in each step: Lightning's checkpoints do not have their state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = new_net()

    def on_train_batch_start(self, *_) -> None:
        torch.manual_seed(self.global_step)

    def training_step(self, batch, _):
        return self.net(**batch)["loss"]

    def validation_step(self, batch, _):
        self.net(**batch)

    def configure_optimizers(self):
        return sgd(self.net.parameters())


class LightningByHand(pl.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 0:
            pl_module.net.freeze(depth_at(0, trainer.estimated_stepping_batches))

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step:
            pl_module.net.freeze(depth_at(trainer.global_step, trainer.estimated_stepping_batches))


def by_lightning(folder, callback, *, epoch=0, module=Module, **options):
    keeps = pl_callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options = {"max_epochs": EPOCHS, "accelerator": "cpu", "devices": 1, **quiet, **options}
    trainer = pl.Trainer(callbacks=[callback, keeps], **options)
    path, module = folder / f"epoch={epoch - 1}.ckpt" if epoch else None, module()
    loaders = DataLoader(rows(), batch_size=BATCH), DataLoader(rows()[:BATCH], batch_size=BATCH)
    trainer.fit(module, *loaders, ckpt_path=path, weights_only=True)
    return end_of(module.net, trainer.optimizers[0]), trainer.global_step


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulation"])
def test_lightning(options, tmp_path):
    by_hand, total = by_lightning(tmp_path / "by hand", LightningByHand(), **options)
    for epoch in (0, *STOPS):
        callback = egeria_lightning.EgeriaCallback(config=CONFIG, directory=tmp_path / "run")
        assert differences(by_hand, by_lightning(tmp_path / "ours", callback, epoch=epoch, **options)[0]) == []
    assert_follows(tmp_path / "run", total)


# --- two ranks -------------------------------------------------------------------------------------------------------


def trainer_on_ranks(folder, epoch):
    return by_trainer(folder, egeria_transformers.EgeriaCallback(CONFIG), epoch=epoch, ddp_backend="gloo")[0]


def accelerate_on_ranks(folder, epoch):
    return by_accelerate(folder, is_ours=True, accumulation=1, epoch=epoch)


def lightning_on_ranks(folder, epoch):
    strategy = pl.strategies.DDPStrategy(process_group_backend="gloo", find_unused_parameters=False)
    callback = egeria_lightning.EgeriaCallback(config=CONFIG, directory=folder / "run")
    return by_lightning(folder, callback, epoch=epoch, strategy=strategy, devices=2)[0]


def go_on_at_each_stop(folder: str, train) -> tuple[dict, list]:
    """Train on a rank in one go and from two checkpoints; return the end, and where the others differ from it."""
    with as_by_torchrun():
        end = train(Path(folder), 0)
        return end["model"], [difference for e in STOPS for difference in differences(end, train(Path(folder), e))]


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("train", [trainer_on_ranks, accelerate_on_ranks, lightning_on_ranks])
def test_two_ranks_go_on_as_if_never_stopped(train, tmp_path):
    (end, differing), (other, differs) = run_ranks(go_on_at_each_stop, str(tmp_path), train)
    assert differing == differs == []
    weights = [name for name in end if "running" not in name]
    assert differences({name: end[name] for name in weights}, {name: other[name] for name in weights}) == []
    assert_follows(tmp_path / ("egeria" if train is trainer_on_ranks else "run"), EPOCHS * BATCHES // 2)
