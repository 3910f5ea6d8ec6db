"""Snapshots of some weights of each layer module over an interval."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rivals.smartfrz.predictor import NUM_SNAPSHOTS, NUM_WEIGHTS
from egeria.model.cut import LayerModule


class WeightHistory:
    """Keeps evenly spaced snapshots of an interval, of the same `NUM_WEIGHTS` weights at most of each parameter.

    How long an interval is need not be known: where twice the snapshots that are wanted have come together, every other
    one goes, and half as many are taken from then on. Takes up to 250 KB for each parameter that trains when it is
    made.

    Source: SmartFRZ "tailors" each layer to 1,024 of its weights, drawn once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = {
            name: _draw(name, parameter.detach()).to(parameter.device)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.detach().numel()
        }
        self.num_steps = 0
        """Of the interval so far."""
        self._spacing = 1
        """Steps between snapshots."""
        self._snapshots: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def end_step(self) -> None:
        """Take a snapshot after an optimizer step, where it is time for one."""
        self.num_steps += 1
        if self.num_steps % self._spacing == 0:
            self._snapshots.append(
                {
                    name: self._model.get_parameter(name).detach().take(places).float()
                    for name, places in self._places.items()
                }
            )
        if len(self._snapshots) == 2 * NUM_SNAPSHOTS:
            self._snapshots, self._spacing = self._snapshots[1::2], 2 * self._spacing

    def windows(self, modules: Sequence[LayerModule]) -> list[Tensor | None]:
        """Return the snapshots of the interval that ends, and begin the next; synchronises the device.

        Returns:
            For each layer module [`NUM_SNAPSHOTS`, `NUM_WEIGHTS`] on the CPU, oldest first: of its matrices and
            kernels, or of what trains in a module without any, as many weights as their share in it, those of a small
            one again and again. None where none train, or the interval had too few steps.
        """
        found, self._snapshots, self.num_steps = self._snapshots, [], 0
        if len(found) < NUM_SNAPSHOTS:
            self._spacing = 1
            return [None] * len(modules)
        chosen = [found[place * (len(found) - 1) // (NUM_SNAPSHOTS - 1)] for place in range(NUM_SNAPSHOTS)]
        return [self._window(module, chosen) for module in modules]

    def _window(self, module: LayerModule, snapshots: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
        trained = [name for name in module.parameters if name in self._places]
        names = [name for name in trained if self._model.get_parameter(name).dim() > 1] or trained
        if not names:
            return None
        sizes = [self._model.get_parameter(name).detach().numel() for name in names]
        counts = [max(1, NUM_WEIGHTS * size // sum(sizes)) for size in sizes]
        rows = torch.stack(
            [
                torch.cat([shot[name][:count].cpu() for name, count in zip(names, counts, strict=True)])
                for shot in snapshots
            ]
        )
        again = -(-NUM_WEIGHTS // rows.shape[1])
        return rows.repeat(1, again)[:, :NUM_WEIGHTS]

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: len(places) for name, places in self._places.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what the interval under way has gathered."""
        shots = [{name: values.clone() for name, values in shot.items()} for shot in self._snapshots]
        return {"spacing": self._spacing, "steps": self.num_steps, "snapshots": shots}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; of an empty one, or of other parameters, with the next interval."""
        shots = state.get("snapshots", ())
        if not all({name: len(values) for name, values in shot.items()} == self._sizes for shot in shots):
            state, shots = {}, ()
        self._spacing, self.num_steps = state.get("spacing", 1), state.get("steps", 0)
        self._snapshots = [
            {name: values.to(self._places[name].device, copy=True) for name, values in shot.items()} for shot in shots
        ]


def _draw(name: str, values: Tensor) -> Tensor:
    """Return which elements of a parameter are looked at: the same ones in each run of the model."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    if values.numel() <= NUM_WEIGHTS:
        return torch.randperm(values.numel(), generator=generator, device="cpu")
    return torch.randint(values.numel(), (NUM_WEIGHTS,), generator=generator, device="cpu")
