"""Workloads of seconds for the tests of the bench; their data are made up."""

from __future__ import annotations

import dataclasses
import os

import torch
from benchmarks.workloads.workload import MissingDataError, Setting, Training, Workload
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR
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


def build_tuned(setting: Setting) -> Training:
    """The clusters, by a model whose normalisation layers look trained, as in a fine-tuning, at a rate that decays."""
    training = build_clusters(setting)
    drawing = torch.Generator().manual_seed(9)
    for block in training.model[:3]:
        block.append(nn.LayerNorm(32))
        nn.init.uniform_(block[-1].weight, 0.5, 1.5, generator=drawing)
    optimizer = torch.optim.Adam(training.model.parameters(), lr=0.005)
    num_steps = training.num_epochs * len(training.loader)
    return dataclasses.replace(
        training, optimizer=optimizer, scheduler=LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    )


def build_narrow(setting: Setting) -> Training:
    """The clusters, by a model with fewer neurons: samples enough for each."""
    training = build_clusters(setting)
    layers = (nn.Sequential(nn.Linear(before, 8), nn.ReLU()) for before in (32, 8, 8))
    model = nn.Sequential(*layers, nn.Linear(8, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = MultiStepLR(optimizer, [len(training.loader) * 4])
    return dataclasses.replace(training, model=model, optimizer=optimizer, scheduler=scheduler)


def build_without_data(setting: Setting) -> Training:
    raise MissingDataError(f"the moon photographs are missing; looked for them in {setting.data / 'moon'}")


def build_broken(setting: Setting) -> Training:
    raise ValueError("a fault in the workload")


def _workload(name: str, build) -> Workload:
    return Workload(name=name, metric="accuracy", higher_is_better=True, is_relative=False, paper="", build=build)


WORKLOADS = (
    _workload("toy", build_clusters),
    _workload("no-data", build_without_data),
    _workload("broken", build_broken),
    _workload("toy-tuned", build_tuned),
    _workload("toy-narrow", build_narrow),
)
