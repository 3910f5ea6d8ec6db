"""All that a training draws by chance: the global generators and those of its loader, read and set."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

PARTS = ("dataset", "sampler", "batch_sampler")
"""Of a loader, whatever their type: torch asks for no base class."""


def find_generators(loader: Any) -> dict[str, torch.Generator]:
    """Return the generators that a loader draws from, its own, its samplers' and its data set's, by where they hang."""
    found: dict[str, torch.Generator] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("loader", loader)]
    while waiting:
        path, holder = waiting.pop()
        for name, value in _attributes(holder):
            if id(value) in seen:
                continue
            if isinstance(value, torch.Generator):
                found[f"{path}.{name}"] = value
            elif name in PARTS or isinstance(value, (Dataset, Sampler)):
                waiting.append((f"{path}.{name}", value))
            else:
                continue
            seen.add(id(value))
    return found


def _attributes(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values; of a list of data sets or samplers, each one."""
    for name, value in getattr(holder, "__dict__", {}).items():
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (Dataset, Sampler)):
            yield from ((f"{name}.{place}", entry) for place, entry in enumerate(value))
        else:
            yield name, value


def read_chance(generators: Mapping[str, torch.Generator], device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators and of these, as plain values and tensors."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "generators": {path: generator.get_state() for path, generator in generators.items()},
    }


def set_chance(state: Mapping[str, Any], generators: Mapping[str, torch.Generator], device: torch.device) -> None:
    """Let chance go on from where it was read.

    Raises:
        KeyError: the loader of that time had other generators.
    """
    if state["generators"].keys() != generators.keys():
        raise KeyError(f"generators were {sorted(state['generators'])}, now {sorted(generators)}")
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    for path, generator in generators.items():
        generator.set_state(state["generators"][path])
