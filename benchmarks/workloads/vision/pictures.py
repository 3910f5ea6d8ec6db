"""Pictures in memory: cropped and flipped at random for training, whole for judging."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from benchmarks.workloads.vision.recipe import Recipe

VOID = 255
"""The target of pixels that belong to no class; no loss and no metric sees them."""


@dataclass(frozen=True)
class Pictures:
    """Pictures and what is to be said about them, as bytes.

    Shapes: N pictures, H rows, W columns.
    """

    images: Tensor
    """[N, H, W, 3]: the layout they are decoded in, which is channels_last when the axes are permuted."""
    targets: Tensor
    """Classes: [N] of pictures, or [N, H, W] of pixels."""


@dataclass(frozen=True)
class Source:
    """A data set as it is read."""

    train: Pictures
    held_out: Pictures
    mean: tuple[float, float, float]
    """Of each colour over the training pictures, in shares of full brightness."""
    deviation: tuple[float, float, float]
    """Standard deviation, likewise."""
    judged: Pictures | None = None
    """More held-out pictures, for the end of the training."""


Reader = Callable[[Path, Recipe], Source]
"""Takes the folder with all data sets. Raises: MissingDataError."""


class PictureBatches(Dataset[tuple[Tensor, Tensor]]):
    """Whole batches of normalised pictures [B, 3, h, w] with their targets; with a generator, cropped and flipped.

    A batch is gathered with one index, tens of times as fast as picture by picture. Workers would each begin
    with the same copy of `generator`, so a loader of training pictures has none.
    """

    def __init__(self, pictures: Pictures, source: Source) -> None:
        self.images, self.targets = pictures.images, pictures.targets
        self.mean = 255 * torch.tensor(source.mean)
        self.deviation = 255 * torch.tensor(source.deviation)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images, targets = self._chosen(torch.tensor(indices))
        normalised = (images.float() - self.mean) / self.deviation
        return normalised.permute(0, 3, 1, 2), targets.long()

    def _chosen(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        return self.images[indices_B], self.targets[indices_B]


class CroppedBatches(PictureBatches):
    """Pictures padded with black (and void), cropped at a random place and flipped half of the time, targets alike."""

    def __init__(self, source: Source, recipe: Recipe, generator: torch.Generator) -> None:
        super().__init__(source.train, source)
        margin = 4 * (recipe.padding,)
        self.images = functional.pad(self.images, (0, 0, *margin))
        if self.targets.dim() == 3:
            self.targets = functional.pad(self.targets, margin, value=VOID)
        self.crop = recipe.crop
        self.generator = generator

    def _chosen(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = (self._span(axis, len(indices_B)) for axis in (0, 1))
        flipped = torch.rand(len(indices_B), 1, generator=self.generator) < 0.5
        columns = torch.where(flipped, columns.flip(1), columns)
        place = (indices_B[:, None, None], rows[:, :, None], columns[:, None, :])
        targets = self.targets[place] if self.targets.dim() == 3 else self.targets[indices_B]
        return self.images[place], targets

    def _span(self, axis: int, count: int) -> Tensor:
        """Return the rows or columns [B, length] of randomly placed crops."""
        length = self.crop[axis]
        room = self.images.shape[1 + axis] - length
        starts = torch.randint(0, room + 1, (count, 1), generator=self.generator)
        return starts + torch.arange(length)
