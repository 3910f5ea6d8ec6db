"""Training loops with the activation cache, and the same without, for tests to compare."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import egeria
from egeria.events import CacheDecided, CacheUsed, Declined, FaultCaught
from loops import differences
from strays import nothing_left_behind

NUM_SAMPLES, BATCH, EPOCHS, WIDTH = 80, 8, 8, 12
EPOCH = NUM_SAMPLES // BATCH
SERVING = 3 * EPOCH
"""Steps after which most of every batch comes from the store."""
MEMORY: dict[str, Any] = {"enabled": "auto", "gate": "open"}
FILE: dict[str, Any] = {"enabled": True, "gate": "open"}
OFF: dict[str, Any] = {"enabled": False}


class Vectors(Dataset):
    """Random rows and classes; tests change `rows`, or `transform`, in the middle of a training."""

    def __init__(self, num_samples: int = NUM_SAMPLES, shape: tuple[int, ...] = (WIDTH,)) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(num_samples, *shape, generator=generator)
        self.labels = torch.randint(0, 4, (num_samples,), generator=generator)
        self.transform: Callable[[Tensor], Tensor] = torch.Tensor.clone

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.rows[index]), self.labels[index]


class Block(nn.Module):
    """A residual block; its passes are counted by its identity."""

    calls: ClassVar["WeakKeyDictionary[Block, int]"] = WeakKeyDictionary()

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.scale = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), 1.0

    @property
    def num_calls(self) -> int:
        """How often it was run."""
        return self.calls.get(self, 0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls[self] = self.num_calls + 1
        return x + self.scale * torch.tanh(self.norm(self.inner(x)))


class Chain(nn.Module):
    """Four blocks, dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


def shuffled(dataset: Dataset, **options: Any) -> DataLoader:
    """Return a loader with an order of its own in each epoch."""
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(1), **options)


class Training:
    """A training whose front two layer modules are frozen soon; equal ones give equal weights."""

    def __init__(
        self,
        directory: Path,
        cache: dict[str, Any],
        *,
        build: Callable[[], nn.Module] = Chain,
        dataset: Any = None,
        loader: Any = None,
        depth: int = 2,
        call: Callable[[Any, Tensor], Tensor] = lambda model, inputs: model(inputs),
        more: dict[str, Any] | None = None,
        **attach: Any,
    ) -> None:
        self.directory, self.call = directory, call
        self.losses, self.warnings = list[float](), list[str]()
        torch.manual_seed(0)
        self.model: Any = build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.dataset = Vectors() if dataset is None else dataset
        self.loader = loader(self.dataset) if loader else shuffled(self.dataset)
        self.loader_before = self.loader_now
        with self.noting():
            self.run: Any = egeria.attach(
                self.model,
                self.optimizer,
                self.loader,
                total_steps=EPOCHS * len(self.loader),
                directory=directory,
                config={**(more or {}), "cache": cache},
                **{"plan": f"0.05:{depth}", **attach},
            )
        self.batches = self.batches_from(0)

    def step(self, inputs: Any, labels: Tensor) -> None:
        """Make one step."""
        self.model.train()
        loss = cross_entropy(self.call(self.model, inputs), labels)
        loss.backward()
        self.advance_optimizer(loss)

    def advance_optimizer(self, loss: Tensor) -> None:
        """Step, and tell the run."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.run is not None:
            self.run.step(loss)
        self.losses.append(loss.item())

    def advance_to(self, num_steps: int) -> None:
        """Train up to a step, or to the end."""
        with self.noting():
            while len(self.losses) < num_steps and (batch := next(self.batches, None)) is not None:
                self.step(*batch)

    def finish(self) -> "Training":
        """Train to the end, close, and see that nothing is left on the model and the loader."""
        self.advance_to(EPOCHS * EPOCH + 1000)
        return self.close()

    def close(self) -> "Training":
        """Close, and see that nothing is left on the model and the loader."""
        with self.noting():
            self.run.close()
        assert self.loader_now == self.loader_before
        assert [name for name, module in self.model.named_modules() if "forward" in vars(module)] == []
        return self

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Collect warnings of egeria; all others are errors."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        strange = [entry for entry in caught if not issubclass(entry.category, egeria.EgeriaWarning)]
        assert not strange, strange
        self.warnings += [str(entry.message) for entry in caught]

    def everything(self) -> dict[str, Any]:
        """Return a copy of all that training changes."""
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for index, entry in self.optimizer.state_dict()["state"].items():
            state[f"momentum {index}"] = entry["momentum_buffer"].clone()
        return {**state, "random": torch.get_rng_state(), "losses": torch.tensor(self.losses, dtype=torch.float64)}

    @property
    def loader_now(self) -> dict[str, Any]:
        """What the loader has; one keeps its workers itself."""
        return {name: value for name, value in vars(self.loader).items() if name != "_iterator"}

    def journal(self, kind: type) -> list[Any]:
        """Return the events of a kind."""
        return egeria.read_journal(self.directory).of(kind)

    @property
    def hits(self) -> int:
        """Samples that came from the store, once it is closed."""
        return sum(event.hits for event in self.journal(CacheUsed))

    @property
    def reasons(self) -> list[str]:
        """Why passes were computed."""
        return [event.reason for event in self.journal(CacheDecided) if event.mode == "computed"]

    @property
    def complaints(self) -> list[str]:
        """What was declined, or failed."""
        return [e.reason for e in self.journal(Declined)] + [e.error for e in self.journal(FaultCaught)]

    @property
    def files(self) -> list[Path]:
        """The files of stores that this process has open below the directory of the run; they have no name."""
        return files_in(self.directory)

    def batches_from(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of the training from an epoch on, each epoch in an order of its own."""
        for number in range(epoch, EPOCHS):
            if self.loader.generator is not None:
                self.loader.generator.manual_seed(number)
            yield from self.loader


def files_in(directory: Path) -> list[Path]:
    """Return ways to the files without a name that this process has open below a directory."""
    start = f"{directory}{os.sep}"
    open_now = [(way, os.path.realpath(way)) for way in Path("/proc/self/fd").iterdir()]
    return [way for way, path in open_now if path.startswith(start) and "egeria-activations" in path]


def compared(
    directory: Path, cache: dict[str, Any], loop: Callable[[Training], Any] = Training.finish, **changes: Any
) -> Training:
    """Train by a loop without the cache and with it; check that nobody can tell; return the latter."""
    trained = []
    for name, settings in (("computed", OFF), ("cached", cache)):
        with nothing_left_behind():
            training = Training(directory / name, settings, **changes)
            loop(training)
            if training.run is not None:
                training.close()
        assert training.files == []
        trained.append(training)
    assert differences(trained[0].everything(), trained[1].everything()) == []
    return trained[1]


def assert_served(training: Training, least: int = 250) -> None:
    """Most samples came from the store, and nothing was complained of."""
    assert training.hits >= least, (training.hits, training.reasons, training.complaints)
    assert training.reasons == [] and training.complaints == [] and training.warnings == []


def assert_refused(training: Training, reason: str) -> None:
    """It was given up for a reason, of which the user was told once."""
    assert len(training.reasons) == 1 and reason in training.reasons[0], training.reasons
    assert len(training.warnings) == 1 and reason in training.warnings[0], training.warnings
