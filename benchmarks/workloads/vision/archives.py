"""Finding and decoding what the data folders hold."""

import io
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.workloads.workload import MissingDataError


def folder_with(root: Path, name: str, files: tuple[str, ...]) -> Path:
    """Return the folder of a data set.

    Raises:
        MissingDataError: the folder or one of the files is not there.
    """
    folder = root / name
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise MissingDataError(
            f"{folder} must hold {', '.join(files)}; {', '.join(missing)} not found there. "
            f"Give the folder that holds {name!r} as the data folder."
        )
    return folder


def decoded(archive: ZipFile, member: str, mode: str, size: tuple[int, int], resampling: Image.Resampling) -> Tensor:
    """Return one picture as bytes, [H, W, 3] in mode 'RGB' and [H, W] in mode 'L'.

    Args:
        archive: where the picture is.
        member: its name there.
        mode: of pillow.
        size: height and width in pixels.
        resampling: how another size is reached.
    """
    with Image.open(io.BytesIO(archive.read(member))) as image:
        resized = image.convert(mode).resize((size[1], size[0]), resampling)
        return torch.from_numpy(np.array(resized))


def spread(items: list[str], count: int) -> list[str]:
    """Return `count` of the items, or all where there are fewer, evenly spaced from the first on."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]
