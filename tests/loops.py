"""The training loops the tests share."""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from egeria import attach
from egeria.session import EgeriaWarning, Run
from laws import support
from laws.support import differences
from menagerie import Specimen

__all__ = ["FAST", "Loop", "differences", "outside"]

FAST = {
    "policy": {"name": "egeria"},
    "plasticity": {"interval_steps": 2, "window": 2},
    "bootstrapping": {"change_threshold": 1.0},
    # Models this small take less time than a look at them, and a process of its own starts when they are done.
    "controller": {"budget_share": 1000.0, "kind": "inline"},
}


@dataclass
class Loop:
    """An ordinary training loop on one specimen, step by step; the same seed sees the same data and random numbers."""

    specimen: Specimen
    attach: dict[str, Any] | None = None
    seed: int = 0
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
        parameters, lr=0.02, momentum=0.9, weight_decay=1e-3
    )
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    losses: list[float] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    """What egeria has warned of."""

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model: nn.Module = self.specimen.build()
        self.called = self.wrap(self.model)
        self.optimizer = self.make_optimizer(self.model.parameters())
        self.data = torch.Generator().manual_seed(self.seed)
        self.run: Run | None = None
        if self.attach is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EgeriaWarning)
                self.run = attach(self.called, self.optimizer, **self.attach)
        self.random = torch.get_rng_state()

    def step(self, count: int = 1, scale: float = 1.0) -> None:
        """Train for `count` steps, calling `train()` before each as loops do after a validation."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random)
            self._steps(count, scale)
            self.random = torch.get_rng_state()

    def _steps(self, count: int, scale: float) -> None:
        for _ in range(count):
            self.called.train()
            args, kwargs = self.specimen.example(self.data)
            loss = self.specimen.loss(self.called(*args, **kwargs)) * scale
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.run:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always", EgeriaWarning)
                    self.run.step(loss)
                self.warned += [str(warning.message) for warning in caught]
            self.losses.append(loss.item())

    def save(self) -> bytes:
        """Return a checkpoint as loops write one."""
        parts = {name: getattr(self, name).state_dict() for name in ("run", "model", "optimizer")}
        rest = {"data": self.data.get_state(), "random": self.random, "losses": self.losses}
        buffer = io.BytesIO()
        torch.save({**parts, **rest}, buffer)
        return buffer.getvalue()

    def load(self, checkpoint: bytes) -> None:
        """Go on from a checkpoint."""
        saved = torch.load(io.BytesIO(checkpoint), weights_only=False)
        for name in ("model", "optimizer", "run"):
            getattr(self, name).load_state_dict(saved[name])
        self.data.set_state(saved["data"])
        self.random, self.losses = saved["random"], saved["losses"]

    def everything(self) -> dict[str, Any]:
        """Return a copy of all that training changes."""
        state = {f"model.{name}": tensor.clone() for name, tensor in self.model.state_dict().items()}
        for index, entry in self.optimizer.state_dict()["state"].items():
            for name, value in entry.items():
                state[f"optimizer.{index}.{name}"] = value.clone() if isinstance(value, Tensor) else value
        return {**state, "random": self.random, "losses": torch.tensor(self.losses, dtype=torch.float64)}


def outside(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model that is not a number: modes, gradients' needs, hooks, attributes."""
    return support.outside(SimpleNamespace(model=model, optimizer=SimpleNamespace(param_groups=[])))
