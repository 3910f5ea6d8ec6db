"""Training with a boundary that stays where it is put: plain, frozen, or with the front from the cache.

What is measured are the library's own parts, `Freezer`, `ModelHooks`, `SampleFeed` and `ActivationCache`, put
together as a session does, but without a controller: nothing is evaluated, and the boundary moves when told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from examples.cifar10 import Cifar10, load
from examples.resnet import cifar_resnet
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from egeria.cache import ActivationCache, CacheDirectory, Outlook, SampleFeed
from egeria.cache.store.disk import DiskStore
from egeria.config import CacheConfig, Config
from egeria.events import CacheDecided, CacheUsed
from egeria.journal import Recorder
from egeria.layers.freezing import Freezer
from egeria.layers.modules import LayerModule, parse_modules
from egeria.parallel import SingleProcess
from egeria.session.following import ModelHooks

QUIET_S = 0.3
"""Without a new row in the store for so long, the writer is done."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and what it is trained on; everything it makes is new and the same each time."""

    name: str
    build: Callable[[], nn.Module]
    loader: Callable[[], DataLoader[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    autocast: bool
    """Whether the forward pass runs in bf16."""


@dataclass(frozen=True, kw_only=True)
class Lap:
    """What an epoch took, and what the cache did in it."""

    cpu_s: float
    """Of all threads of the process, reader and writer included."""
    wall_s: float
    stall_s: float = 0.0
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    thread_cpu_s: float = 0.0
    """Of the CPU time, what the reader and the writer took."""


class Arm:
    """One way to train: a model of its own, its loader, and the cache if there is one.

    Args:
        name: in tables.
        subject: what is trained.
        depth: front layer modules that `freeze` freezes.
        settings: of the cache; None trains without it.
        directory: where stores go.
        slow_bytes_per_s: makes the disk that slow.
        seed: of the weights.
    """

    def __init__(
        self,
        name: str,
        subject: Subject,
        depth: int,
        settings: CacheConfig | None,
        directory: Path,
        *,
        slow_bytes_per_s: float | None = None,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.name, self.depth = name, depth
        self.deciding_s = (0.0, 0.0)
        """Wall-clock and CPU seconds that deciding took."""
        self._subject = subject
        self.model = subject.build().train()
        self.modules = parse_modules(self.model)
        self.loader = subject.loader()
        self.optimizer = subject.optimizer(self.model)
        self.network = self.model
        self._hooks = ModelHooks(self.model, SingleProcess())
        self._random_state = torch.get_rng_state()
        self._freezer: Freezer | None = None
        self._recorder = Recorder(None)
        self.store: DiskStore | None = None
        self._used: CacheUsed | None = None
        self._cache: ActivationCache | None = None
        if settings is not None:
            place = partial(_Place, directory / name.replace(" ", "-"), self, slow_bytes_per_s)
            feed = SampleFeed(self.loader, id_column=None)
            self._cache = ActivationCache(
                model=self.model,
                feed=feed,
                make_directory=place,
                settings=settings,
                recorder=self._recorder,
                spend=self._spend,
            )
            self._hooks.skip_with(self._cache.forward)

    @property
    def decided(self) -> CacheDecided | None:
        """Return how the forward pass is made, and the numbers that decided."""
        return next((event for event in reversed(self._recorder.recent) if type(event) is CacheDecided), None)

    def freeze(self, front: LayerModule | None = None) -> None:
        """Freeze the front layer modules, or one cut by hand in their place."""
        frozen = self.modules[: self.depth] if front is None else (front,)
        self._freezer = Freezer(self.model, frozen)
        self._freezer.freeze_to(len(frozen))
        if self._cache is not None:
            self._cache.move_boundary(frozen, Outlook(steps_ahead=None))

    @torch.no_grad()
    def answer_for_nothing(self) -> None:
        """Let the frozen front give the same answers to all batches, which no cache can beat."""
        answers: dict[nn.Module, Any] = {}
        roots = [self.model.get_submodule(name) for module in self.modules[: self.depth] for name in module.submodules]
        handles = [root.register_forward_hook(lambda root, _, output: answers.update({root: output})) for root in roots]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._subject.autocast):
            self._subject.loss(self.model, next(iter(self.loader)))
        for handle in handles:
            handle.remove()
        for root in roots:
            vars(root)["forward"] = partial(_answer, answers[root])

    def epoch(self) -> None:
        """Train for one epoch, with random numbers of its own: dropout is that of the other arms."""
        torch.set_rng_state(self._random_state)
        self.network.train()
        for batch in self.loader:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._subject.autocast):
                loss = self._subject.loss(self.network, batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._random_state = torch.get_rng_state()

    def lap(self, *, cold: bool = False) -> Lap:
        """Train for one epoch and return what it took.

        Args:
            cold: what is stored comes from the disk, not from the page cache.
        """
        if cold and self.store is not None:
            self.store.drop_pages()
        begin_cpu, begin = time.process_time(), time.perf_counter()
        self.epoch()
        settled_s = self._settle()
        cpu_s, wall_s = time.process_time() - begin_cpu, time.perf_counter() - begin - settled_s
        return Lap(cpu_s=cpu_s, wall_s=wall_s, **self._difference())

    def close(self) -> None:
        """Let go of everything."""
        if self._cache is not None:
            self._cache.close()

    def _settle(self) -> float:
        """Wait until the writer is done, whose work belongs to this epoch; return how long that was."""
        begin = time.perf_counter()
        stored = -1
        while self.store is not None and (now := self.store.num_stored) not in (stored, self.store.capacity):
            stored = now
            time.sleep(QUIET_S)
        return time.perf_counter() - begin

    def _difference(self) -> dict[str, Any]:
        """Return what the cache did since the last time."""
        if self._cache is None:
            return {}
        self._cache.report()
        events = [event for event in self._recorder.recent if type(event) is CacheUsed]
        now, before = events[-1] if events else None, self._used
        self._used = now
        names = ("stall_s", "hits", "misses", "bytes_read", "thread_cpu_s")
        return {name: getattr(now, name, 0) - getattr(before, name, 0) for name in names}

    def _spend(self, wall_s: float, cpu_s: float) -> None:
        self.deciding_s = (self.deciding_s[0] + wall_s, self.deciding_s[1] + cpu_s)


class _Place(CacheDirectory):
    """A cache directory that shows its store to the arm, and can be as slow as wanted."""

    def __init__(self, path: Path, arm: Arm, slow_bytes_per_s: float | None) -> None:
        super().__init__(path)
        self._arm, self._slow_bytes_per_s = arm, slow_bytes_per_s

    def create(self, number: int, layouts: Sequence[Any], capacity: int, **description: Any) -> DiskStore:
        """Make the store of a generation."""
        store = super().create(number, layouts, capacity, **description)
        if self._slow_bytes_per_s is None:
            self._arm.store = store
        else:
            store.read = partial(_read_slowly, store.read, store.row_bytes / self._slow_bytes_per_s)  # type: ignore[method-assign]
        return store


def _answer(answer: Any, *_args: Any, **_named: Any) -> Any:
    return answer


def _read_slowly(read: Callable[..., Any], seconds_per_row: float, positions: Any, *others: Any, **named: Any) -> Any:
    time.sleep(seconds_per_row * len(positions))
    return read(positions, *others, **named)


def cache_settings(**changes: Any) -> CacheConfig:
    """Return settings of the cache, switched on."""
    return Config.from_dict({"cache": {"enabled": True, **changes}}).cache


def residual_net(
    depth: int, data: Path | None, samples: int, *, autocast: bool, layout: torch.memory_format = torch.channels_last
) -> Subject:
    """Return a residual net on CIFAR-10 without augmentation, or on noise of that shape.

    Args:
        depth: of the net.
        data: where CIFAR-10 is; None takes noise.
        samples: of an epoch.
        autocast: whether to train in bf16.
        layout: of weights and images in memory.
    """
    generator = torch.Generator().manual_seed(0)
    if data is None:
        images = torch.randint(0, 256, (samples, 3, 32, 32), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (samples,), generator=generator)
    else:
        sheets = [f"data_batch_{index}" for index in range(1, 1 + -(-samples // 10000))]
        images, labels = (tensor[:samples] for tensor in load(data, sheets))

    def loader() -> DataLoader[Any]:
        shuffling = torch.Generator().manual_seed(1)
        dataset = Cifar10(images, labels)
        return DataLoader(
            dataset,
            batch_size=128,
            shuffle=True,
            drop_last=True,
            generator=shuffling,
            collate_fn=lambda batch: (batch[0].contiguous(memory_format=layout), batch[1]),
        )

    return Subject(
        name=f"resnet{depth}",
        build=lambda: cifar_resnet(depth).to(memory_format=layout),
        loader=loader,
        loss=lambda network, batch: functional.cross_entropy(network(batch[0]), batch[1]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4),
        autocast=autocast,
    )


def bert(samples: int, *, autocast: bool, tokens: int = 128) -> Subject:
    """Return an encoder of six layers of BERT's width with a head for two classes, on random words.

    Args:
        samples: of an epoch.
        autocast: whether to train in bf16.
        tokens: of a sample.
    """
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415 - takes seconds

    config = BertConfig(num_hidden_layers=6)
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1000, config.vocab_size, (samples, tokens), generator=generator)
    rows = [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": torch.tensor(index % 2)}
        for index, row in enumerate(words)
    ]

    def loader() -> DataLoader[Any]:
        return DataLoader(rows, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))  # type: ignore[arg-type]

    return Subject(
        name="bert",
        build=lambda: BertForSequenceClassification(config),
        loader=loader,
        loss=lambda network, batch: network(**batch).loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-5),
        autocast=autocast,
    )


def in_turn(arms: Sequence[Arm], rounds: int, *, cold: bool) -> Iterator[dict[str, Lap]]:
    """Train each arm for an epoch, `rounds` times; who begins changes every round."""
    for index in range(rounds):
        turn = index % len(arms)
        order = [*arms[turn:], *arms[:turn]]
        yield {arm.name: arm.lap(cold=cold) for arm in order}
