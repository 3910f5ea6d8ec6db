"""What is judged, from one matrix that counts classes against what was said.

Shape legend: K classes.
"""

import torch
from torch import Tensor

from benchmarks.workloads.vision.pictures import VOID


def confusion(predicted: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    """Count pairs of classes [K, K], truth by row and prediction by column; void targets do not count."""
    known = targets != VOID
    pairs = targets[known] * num_classes + predicted[known]
    return torch.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def accuracy(counts_KK: Tensor) -> float:
    """Return the share that was classified correctly, in %."""
    return 100 * (counts_KK.trace() / counts_KK.sum()).item()


def mean_iou(counts_KK: Tensor) -> float:
    """Return the mean over classes of intersection over union, in %; a class neither there nor said is left out."""
    hits_K = counts_KK.diagonal()
    union_K = counts_KK.sum(0) + counts_KK.sum(1) - hits_K
    return 100 * (hits_K[union_K > 0] / union_K[union_K > 0]).mean().item()


MEASURES = {"accuracy": accuracy, "miou": mean_iou}
