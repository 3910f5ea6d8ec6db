"""The images that the examples for Accelerate and Lightning train on: CIFAR-10 from a folder, else digits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset


def load_images(data: Path | None) -> tuple[TensorDataset, TensorDataset, int]:
    """Return images and labels to train on, others to test with, and the number of channels.

    Args:
        data: folder with CIFAR-10, as examples/cifar10.py takes it; None for the 8 x 8 digits of scikit-learn, enlarged
            to 16 x 16.
    """
    if data is not None:
        from cifar10 import DEVIATION, MEAN, load  # noqa: PLC0415 (needs Pillow)

        train, test = load(data, ["data_batch_1"]), load(data, ["test_batch"])
        parts = [TensorDataset((images.float() - MEAN) / DEVIATION, labels) for images, labels in (train, test)]
        return parts[0], parts[1], 3
    from sklearn import datasets  # noqa: PLC0415 (needs scikit-learn)

    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = functional.interpolate(images, scale_factor=2, mode="bilinear")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor(bunch.target)
    test_indices, train_indices = order[:449], order[449:]
    train_set = TensorDataset(images[train_indices], labels[train_indices])
    return train_set, TensorDataset(images[test_indices], labels[test_indices]), 1
