"""The two lines of the README in a training of seconds: a small network, and points that are drawn here."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import egeria

torch.manual_seed(0)
inputs = torch.randn(512, 16)
loader = DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=32, shuffle=True)
blocks = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(*blocks, nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
epochs = 5
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(loader) * epochs)
criterion = nn.CrossEntropyLoss()

# The plan is given, because by default nothing is frozen in a model that is trained from scratch.
settings = {"plan": "0:99 0.25:0 0.6:1 0.8:2", "directory": "run"}
run = egeria.attach(model, optimizer, loader, scheduler=scheduler, total_steps=len(loader) * epochs, **settings)
for _epoch in range(epochs):
    for points, targets in loader:
        loss = criterion(model(points), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.step(loss)
run.close()
print(egeria.report(run.directory))
