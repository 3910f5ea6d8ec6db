"""The predictor: attention over snapshots of some weights of a layer module."""

from __future__ import annotations

import itertools
import math
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

NUM_SNAPSHOTS, NUM_WEIGHTS = 30, 1024
"""Of an interval, and of a layer module in each: the paper's."""
HIDDEN, WIDTH = 256, 64
LEAST_SCALE = 1e-12
OWN_WEIGHTS = Path(__file__).with_name("predictor.safetensors")


class FreezePredictor(nn.Module):
    """Says by how much more likely it is that a layer module may freeze than that it must train, from its weights.

    The newest snapshot asks, the older ones answer: three networks make a query of it, and a key and a value of each
    of them; what attention returns goes through a fourth. 1.04 million parameters.

    Source: SmartFRZ, section 4. Ours: weights are taken relative to the mean and standard deviation of the newest
    snapshot, so that layers of all sizes look alike, and of older ones their difference from the newest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (_network(NUM_WEIGHTS, HIDDEN, HIDDEN, WIDTH) for _ in range(3))
        self.head = _network(WIDTH, 32, 32, 2)

    def forward(self, windows: Tensor) -> Tensor:
        """Return logits [B, 2] of "train" and "freeze".

        Args:
            windows: [B, `NUM_SNAPSHOTS`, `NUM_WEIGHTS`], oldest first: the same weights in each snapshot.
        """
        newest = windows[:, -1]
        scale = newest.std(dim=1, keepdim=True).clamp_min(LEAST_SCALE)
        older = (windows[:, :-1] - newest[:, None]) / scale[:, None]
        query_BD = self.query((newest - newest.mean(dim=1, keepdim=True)) / scale)
        key_BSD, value_BSD = self.key(older), self.value(older)
        scores_BS = torch.einsum("bd,bsd->bs", query_BD, key_BSD) / math.sqrt(WIDTH)
        logits: Tensor = self.head(torch.einsum("bs,bsd->bd", scores_BS.softmax(dim=1), value_BSD))
        return logits

    @torch.no_grad()
    def score(self, windows: Tensor) -> list[float]:
        """Return for each window the probability of "freeze"; NaN where weights are not finite."""
        return [float(probability) for probability in self(windows.float()).softmax(dim=1)[:, 1]]


def _network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@cache
def load_predictor(path: Path = OWN_WEIGHTS) -> FreezePredictor:
    """Return a trained predictor, on the CPU, in float32 and inference mode; read once."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # the numbers that it begins with are of no use
        predictor = FreezePredictor().float()  # whatever the user's default is
    predictor.load_state_dict({name: values.float() for name, values in load_file(path).items()})
    return predictor.eval().requires_grad_(False)


def save_predictor(predictor: FreezePredictor, path: Path) -> None:
    """Write the weights in half precision."""
    save_file({name: values.half().contiguous() for name, values in predictor.state_dict().items()}, path)
