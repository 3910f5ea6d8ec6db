"""Workloads of seconds for the tests of the bench; their data are made up."""

import os

import torch
from benchmarks.workloads.workload import Setting, Training, Workload
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset


def build_clusters(setting: Setting) -> Training:
    """Sixteen clusters of points; whoever changes TOY_RATE changes the recipe."""
    drawing = torch.Generator().manual_seed(7)
    centres = torch.randn(16, 32, generator=drawing)
    labels = torch.arange(16).repeat(48)
    points = centres[labels] + torch.randn(len(labels), 32, generator=drawing)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)), nn.Linear(32, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=float(os.environ.get("TOY_RATE", "0.01")))
    shuffling = torch.Generator().manual_seed(setting.seed)
    data = TensorDataset(points[:512], labels[:512])
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=shuffling)

    def loss(network: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(network(batch[0]), batch[1])

    def evaluate(network: nn.Module) -> dict[str, float]:
        return {"accuracy": 100 * (network(points[512:]).argmax(1) == labels[512:]).float().mean().item()}

    return Training(
        model=model,
        loader=loader,
        optimizer=optimizer,
        scheduler=MultiStepLR(optimizer, [len(loader) * 4]),
        num_epochs=5,
        loss=loss,
        evaluate=evaluate,
        clip_norm=5.0,
    )


def build_broken(setting: Setting) -> Training:
    raise ValueError("a fault in the workload")


def _workload(name: str, build) -> Workload:
    return Workload(name=name, metric="accuracy", higher_is_better=True, is_relative=False, paper="", build=build)


WORKLOADS = (_workload("toy", build_clusters), _workload("broken", build_broken))
