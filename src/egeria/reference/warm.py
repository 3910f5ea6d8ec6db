"""Paying for first uses before they count."""

from __future__ import annotations

import torch
from torch import nn

from egeria.layers.batch import Batch
from egeria.reference.ladder import LadderReference
from egeria.reference.survey import in_fp32


def warm_up() -> None:
    """Import and use once whatever building a reference on the CPU needs."""
    with torch.random.fork_rng(devices=[]):
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 4), nn.Linear(4, 4))
        for precision in ("int8", "int8-dynamic", "bf16"):
            reference = LadderReference(["0", "2", "3"], precision=precision)
            batch = Batch(args=(torch.zeros(2, 3, 8, 8),), kwargs={}, autocast=in_fp32("cpu"))
            reference.refresh(model, batch)
            reference.refresh(model)
            reference.activation("3", batch)
