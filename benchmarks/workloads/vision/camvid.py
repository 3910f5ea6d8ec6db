"""CamVid as SegNet has it: street scenes of 480 x 360 pixels, eleven classes and void."""

from functools import lru_cache
from pathlib import Path
from zipfile import ZipFile

import torch
from PIL import Image

from benchmarks.workloads.vision.archives import decoded, folder_with, spread
from benchmarks.workloads.vision.pictures import VOID, Pictures, Source
from benchmarks.workloads.vision.recipe import Recipe

NUM_CLASSES = 11
"""Sky, building, pole, road, pavement, tree, sign, fence, car, pedestrian, bicyclist; the next number is void."""


@lru_cache(maxsize=1)
def read_camvid(root: Path, recipe: Recipe) -> Source:
    """Read training and test frames; fewer than all are spread over the drives.

    Where the recipe has a judge, it gets the test frames, and the evaluations those for validation.

    Raises:
        MissingDataError: an archive is not there.
    """
    held_out = "val.zip" if recipe.num_judged else "test.zip"
    folder = folder_with(root, "camvid", ("train.zip", held_out, "test.zip"))
    return Source(
        train=_frames(folder / "train.zip", recipe.num_train, recipe.size),
        held_out=_frames(folder / held_out, recipe.num_held_out, recipe.size),
        judged=_frames(folder / "test.zip", recipe.num_judged, recipe.size) if recipe.num_judged else None,
        mean=(0.415, 0.428, 0.434),
        deviation=(0.297, 0.300, 0.296),
    )


def _frames(path: Path, count: int, size: tuple[int, int]) -> Pictures:
    with ZipFile(path) as archive:
        names = sorted(Path(name).stem for name in archive.namelist() if name.startswith("img/"))
        names = spread(names, count)
        images = [decoded(archive, f"img/{name}.webp", "RGB", size, Image.Resampling.BILINEAR) for name in names]
        # A class is a name, not a quantity: between two of them there is nothing to interpolate.
        masks = [decoded(archive, f"ann/{name}.png", "L", size, Image.Resampling.NEAREST) for name in names]
    targets = torch.stack(masks)
    return Pictures(torch.stack(images), targets.masked_fill(targets == NUM_CLASSES, VOID))
