"""What a store is: the file that makes it one, written last and at once."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from egeria.cache.store.files import PRIVATE
from egeria.cache.store.rows import RowLayout, StoreError

FILE_NAME = "manifest.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything another process must know to read a store."""

    layouts: tuple[RowLayout, ...]
    capacity: int
    """Positions that have a place."""
    boundary: str
    """Name of the last frozen layer module."""
    num_views: int = 1
    """Augmentation variants of a sample, side by side."""
    is_viewed: bool = False
    """Whether augmentation is fixed: what is stored for other inputs is of no use."""
    front: int = 0
    """Checksum of the weights and statistics of the frozen layers."""

    def save(self, directory: Path) -> None:
        """Write the file in one step, with who made it and when. Raises `OSError`."""
        layouts = [{**asdict(layout), "dtype": str(layout.dtype).removeprefix("torch.")} for layout in self.layouts]
        record = {
            "schema_version": SCHEMA_VERSION,
            "boundary": self.boundary,
            "capacity": self.capacity,
            "num_views": self.num_views,
            "is_viewed": self.is_viewed,
            "front": self.front,
            "layouts": layouts,
            **maker(),
        }
        beginning = directory / f".{FILE_NAME}"
        descriptor = os.open(beginning, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(record, file)
        beginning.replace(directory / FILE_NAME)

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read the file.

        Raises:
            StoreError: there is none, or it is not ours.
        """
        path = directory / FILE_NAME
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["schema_version"] != SCHEMA_VERSION:
                raise StoreError(f"{path} must have schema {SCHEMA_VERSION}, found {record['schema_version']}.")
            layouts = tuple(_layout(entry) for entry in record["layouts"])
            return cls(
                layouts=layouts,
                capacity=int(record["capacity"]),
                boundary=str(record["boundary"]),
                num_views=int(record["num_views"]),
                is_viewed=bool(record["is_viewed"]),
                front=int(record["front"]),
            )
        except OSError as error:
            raise StoreError(f"There is no store in {directory}: {error}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{path} must describe a store, found {type(error).__name__}: {error}.") from error


def maker() -> dict[str, Any]:
    """Return who and when this is, to be read by people; nothing is decided by it."""
    boot_id = ""
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"pid": os.getpid(), "boot_id": boot_id, "created": round(time.time(), 3)}


def _layout(entry: dict[str, Any]) -> RowLayout:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is no type of tensors")
    shape = tuple(int(size) for size in entry["shape"])
    return RowLayout(shape=shape, dtype=dtype, storage=entry["storage"], length_axis=entry["length_axis"])
