"""Early stopping, averages of weights, and loops of Fabric: what becomes of a plan, as docs/frameworks.md says."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import egeria

PLAN = "0:99 0.25:0 0.5:2"
EPOCHS, STEPS = 4, 32


def network():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()) for _ in range(3))
    return nn.Sequential(*blocks, nn.Linear(8, 2))


def points():
    drawn = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(drawn, (drawn[:, 0] > 0).long())


def train(model, optimizer, loader, run, behind_step=lambda: None, backward=torch.Tensor.backward):
    depths = []
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
            behind_step()
            depths.append(run.frozen)
    return depths


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_stops_early_has_done_the_part_of_the_plan_up_to_there(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = pytest.importorskip("egeria.integrations.transformers")

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, points, labels):
            return {"loss": nn.functional.cross_entropy(self.net(points), labels)}

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == STEPS // 2 - 2

    options = {"max_steps": STEPS, "per_device_train_batch_size": 8, "use_cpu": True, "report_to": []}
    options |= {
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "output_dir": str(tmp_path),
    }
    rows = [{"points": point, "labels": label} for point, label in points()]
    callback = ours.EgeriaCallback(plan=PLAN)
    model, arguments = Wrapped(), transformers.TrainingArguments(**options)
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback, Stop()]).train()
    made = egeria.report(tmp_path / "egeria")
    assert [point.frozen for point in made.summary.depths if point.num_steps] == [3, 0]
    assert (made.summary.step, made.summary.total_steps) == (14, 32) and "14 of the 32 steps" in str(made)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_average_of_the_weights_goes_on_while_layers_are_frozen(tmp_path):
    model = network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(points(), batch_size=8)
    by_hand, seen = [entry.detach().clone() for entry in model.parameters()], []

    def follow():
        average.update_parameters(model)
        for mean, entry in zip(by_hand, model.parameters(), strict=True):
            mean.copy_(entry.detach() if not seen else torch.lerp(mean, entry.detach(), 0.5))
        seen.append(None)

    with egeria.attach(model, optimizer, loader, total_steps=STEPS, plan=PLAN, directory=tmp_path) as run:
        depths = train(model, optimizer, loader, run, follow)
    assert set(depths) == {0, 2, 3}
    for mean, entry in zip(by_hand, average.module.parameters(), strict=True):
        torch.testing.assert_close(entry, mean)


@pytest.mark.filterwarnings("ignore")
def test_a_loop_of_fabric_freezes_like_a_plain_one(tmp_path):
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    found = []
    for name in ("plain", "fabric"):
        model, loader = network(), DataLoader(points(), batch_size=8)
        called, optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.01)
        if name == "fabric":
            called, optimizer = fabric.setup(model, optimizer)
            loader = fabric.setup_dataloaders(loader)
        options = {"total_steps": STEPS, "plan": PLAN, "directory": tmp_path / name}
        with egeria.attach(called, optimizer, loader, **options) as run:
            backward = fabric.backward if name == "fabric" else torch.Tensor.backward
            depths = train(called, optimizer, loader, run, backward=backward)
        found.append((depths, copy.deepcopy(model.state_dict())))
    assert found[0][0] == found[1][0] and set(found[0][0]) == {0, 2, 3}
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())
