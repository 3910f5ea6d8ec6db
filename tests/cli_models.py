"""What `egeria modules tests:…` is pointed at: callables that return a model, and some that do not."""

import torch
from examples.resnet import cifar_resnet
from torch import nn


class Named(nn.Module):
    """Defined back to front, and called by the names of its arguments."""

    def __init__(self):
        super().__init__()
        self.head, self.stem = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, *, x):
        return self.head(self.stem(x))


def resnet():
    return cifar_resnet(20)


def named():
    return Named()


def no_model():
    return {"model": nn.Linear(2, 2)}


def single_layer():
    return nn.Linear(2, 2)


def needs_an_argument(depth):
    return cifar_resnet(depth)


def fails():
    raise RuntimeError("out of [bold]luck[/]")


def training():
    model = named()
    data = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(3)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), data, named_loss


def named_loss(model, batch):
    return nn.functional.cross_entropy(model(x=batch[0]), batch[1])


def training_without_optimizer():
    return {"model": named(), "data": []}
