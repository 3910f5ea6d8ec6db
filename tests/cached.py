"""A training loop with the activation cache that tests can stop, harm and resume."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from examples.resnet import cifar_resnet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import egeria
from egeria.cache.generation import Generation
from egeria.events import CacheDecided, CacheUsed, Declined, FaultCaught
from egeria.session import EgeriaWarning
from egeria.testing import ScriptedController
from loops import FAST, differences
from strays import nothing_left_behind

NUM_SAMPLES = 80
BATCH_SIZE = 8
EPOCH = NUM_SAMPLES // BATCH_SIZE
EPOCHS = 6
FILLING = 22
"""Steps after which some samples came from the store, and others are still to be written."""
SERVING = 35
"""Steps after which every sample is in the store, and most came from it already."""


def freezes_up_to(depth: int) -> Callable[[int, int], float]:
    """Return readings by which `depth` front layer modules freeze soon and the next one never does."""
    return lambda evaluation, module: 1.0 if module < depth else 2.0**evaluation


class Pictures(Dataset):
    """Random pictures; tests exchange `images` or `transform` in the middle of a training."""

    def __init__(self, num_samples: int = NUM_SAMPLES, side: int = 8) -> None:
        random = torch.Generator().manual_seed(0)
        self.images = torch.randn(num_samples, 3, side, side, generator=random)
        self.labels = torch.randint(0, 10, (num_samples,), generator=random)
        self.transform: Callable[[Tensor], Tensor] = torch.Tensor.clone

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.images[index]), self.labels[index]


def small_resnet() -> nn.Module:
    """Return three layer modules for pictures of 8x8."""
    return cifar_resnet(8)


@dataclass
class Training:
    """A training of some epochs, made step by step; equal ones give equal weights."""

    directory: Path
    cached: bool = True
    epochs: int = EPOCHS
    depth: int = 1
    build: Callable[[], nn.Module] = small_resnet
    dataset: Any = field(default_factory=Pictures)
    settings: dict[str, Any] = field(default_factory=dict)
    batch_size: int = BATCH_SIZE

    def __post_init__(self) -> None:
        self.losses: list[float] = []
        self.warnings: list[str] = []
        torch.manual_seed(0)
        self.model = self.build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        order = torch.Generator().manual_seed(1)
        self.loader = DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True, generator=order)
        self.loader_before = dict(vars(self.loader))
        cache = {"enabled": self.cached, "gate": "open", **self.settings}
        with self._noting_warnings():
            self.run: Any = egeria.attach(
                self.model,
                self.optimizer,
                self.loader,
                total_steps=len(self.loader) * self.epochs,
                directory=self.directory,
                controller=ScriptedController(freezes_up_to(self.depth)),
                config={**FAST, "cache": cache},
            )
        self.network: Any = self.model
        self._batches = self._all_batches()

    def advance(self, num_steps: int) -> None:
        """Train so many steps, or to the end."""
        with self._noting_warnings():
            for _, (images, labels) in zip(range(num_steps), self._batches, strict=False):
                self.network.train()
                loss = nn.functional.cross_entropy(self.network(images), labels)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.run is not None:  # a test may have dropped it
                    self.run.step(loss)
                self.losses.append(loss.item())

    def advance_to(self, step: int) -> None:
        """Train to a step, by which some samples came from the store."""
        self.advance(step - len(self.losses))
        if self.cached:
            assert self.generation.use.hits > 0, "the test is empty if nothing is served before the fault"

    def finish(self) -> None:
        """Train to the end and close."""
        self.advance(self.epochs * len(self.loader))
        self.close()

    def close(self) -> None:
        """Close the run, and see that nothing is left of it but the journal."""
        with self._noting_warnings():
            self.run.close()
        assert vars(self.loader) == self.loader_before, "the loader is as it was"
        assert_no_stubs(self.model)
        assert "forward" not in vars(self.model)

    def everything(self) -> dict[str, Any]:
        """Return a copy of all that training changes."""
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        momenta = {f"momentum.{index}": entry["momentum_buffer"] for index, entry in self.optimizer.state.items()}
        losses = torch.tensor(self.losses, dtype=torch.float64)
        return {**state, **{str(key): value.clone() for key, value in momenta.items()}, "losses": losses}

    @property
    def way(self) -> Any:
        """How forwards are made now."""
        return self.run._session._skipping._cache.mode

    @property
    def generation(self) -> Generation:
        """What is stored now."""
        assert isinstance(self.way, Generation), "nothing is stored"
        return self.way

    @property
    def store_path(self) -> Path:
        """A way to the store, which has no name of its own."""
        return Path(f"/proc/self/fd/{self.generation.store.descriptor}")

    def journal(self, kind: type) -> list[Any]:
        """Return the events of a kind."""
        return egeria.read_journal(self.directory).of(kind)

    @property
    def modes(self) -> list[str]:
        """The ways that were taken, one after the other."""
        return [event.mode for event in self.journal(CacheDecided)]

    @property
    def complaints(self) -> list[str]:
        """What was declined but freezing itself, or failed, as the journal has it."""
        declined = [event.reason for event in self.journal(Declined) if event.what != "freezing"]
        return declined + [event.error for event in self.journal(FaultCaught)]

    @property
    def num_hits(self) -> int:
        """Samples that came from a store, over all generations; known once they are closed."""
        last = {event.generation: event.hits for event in self.journal(CacheUsed)}
        return sum(last.values())

    def _all_batches(self) -> Iterator[Any]:
        for _ in range(self.epochs):
            yield from self.loader

    def _noting_warnings(self) -> Any:
        return _Noting(self.warnings)


class _Noting(warnings.catch_warnings):
    """Collects warnings of ours; all others are errors here."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__(record=True)
        self._messages = messages

    def __enter__(self) -> Any:
        self._caught = super().__enter__()
        warnings.simplefilter("always")
        return self._caught

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        for entry in self._caught or ():
            assert issubclass(entry.category, EgeriaWarning), entry
            self._messages.append(str(entry.message))


def plain(directory: Path, **changes: Any) -> Training:
    """Return the same training without the cache, at its end."""
    training = Training(directory / "plain", cached=False, **changes)
    training.finish()
    return training


def assert_turned_off(training: Training, reason: str) -> None:
    """The cache was given up, for a reason that the user was told once, and that the journal has."""
    (warning,) = [message for message in training.warnings if not message.startswith("egeria: freezing:")]
    assert reason in warning and "Training continues" in warning
    assert len(training.complaints) == 1 and reason in training.complaints[0]
    decided = [event for event in training.journal(CacheDecided) if reason in event.reason]
    assert [event.mode for event in decided] == ["computed"]


def assert_no_stubs(model: nn.Module) -> None:
    """Every module runs its own forward; the model itself may ask the cache first, as long as its run is open."""
    assert [name for name, module in model.named_modules() if "forward" in vars(module) and name] == []


def open_files(directory: Path) -> list[str]:
    """Return the files below a directory that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(entry.readlink()))
    return [name for name in found if name.startswith(str(directory))]


@contextmanager
def nothing_but_journals(directory: Path) -> Iterator[None]:
    """Check that the block leaves no thread, no descriptor and no file of a cache."""
    with nothing_left_behind():
        yield
        gc.collect()
        left_open = open_files(directory)
        assert left_open == []
    left = {entry.name for entry in directory.rglob("*") if entry.is_file()}
    assert left <= {"journal.jsonl", "report.html"}, left


def assert_equal(first: Training, second: Training) -> None:
    """Two trainings gave the same losses and weights, to the last bit."""
    assert differences(first.everything(), second.everything()) == []
