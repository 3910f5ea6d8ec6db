"""What people do by hand to train less: the last layers only, another half in each epoch, or fewer steps."""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from benchmarks.rivals.base import FrontRival, Option, Rival, is_number
from benchmarks.rivals.layers import Layers
from benchmarks.workloads.workload import Training


@dataclass(eq=False)
class HeadOnly(FrontRival):
    """'head-only': all but the last layer module are frozen from the start; also its front, with 'classifier'."""

    options: ClassVar[dict[str, Option]] = {
        "part": Option("module", "module or classifier", ("module", "classifier").__contains__),
    }

    def prepare(self) -> None:
        """Nothing of the last layer module is fixed yet."""
        self._fixed: list[torch.nn.Parameter] = []

    def begin_epoch(self, epoch: int) -> None:
        """Freeze, at the first."""
        self.move_to(self.layers.deepest, "from the start")
        if self.values["part"] == "classifier" and not self._fixed:
            # All but the last submodule with parameters of its own.
            owners = [own for own in self.training.model.modules() if any(True for _ in own.parameters(recurse=False))]
            head = {*owners[-1].parameters()}
            own = (entry for entry in self.layers.parameters[-1] if entry.requires_grad)
            self._fixed = [entry.requires_grad_(False) for entry in own if entry not in head]

    def close(self) -> None:
        """Leave the model as it was found."""
        super().close()
        for parameter in self._fixed:
            parameter.requires_grad_(True)


@dataclass(eq=False)
class Half(Rival):
    """'hft': a random half of the layer modules keep their weights in each epoch, wherever they are.

    Like Half Fine-Tuning (Hui et al., 2024), with layer modules and epochs for their matrices and rounds. The last one
    always trains. What that skips of the compute is not known.
    """

    def __post_init__(self) -> None:
        self.layers = Layers(self.training.model)
        self._parameters = [[entry for entry in own if entry.requires_grad] for own in self.layers.parameters[:-1]]

    def begin_epoch(self, epoch: int) -> None:
        """Choose what is not trained in an epoch, by its number and the seed of the run alone."""
        count = len(self._parameters) // 2
        fixed = random.Random(f"{torch.initial_seed()} {epoch}").sample(range(len(self._parameters)), count)
        for number, parameters in enumerate(self._parameters):
            for parameter in parameters:
                parameter.requires_grad_(number not in fixed)
                if number in fixed:
                    parameter.grad = None

    def close(self) -> None:
        """Leave the model as it was found."""
        for parameter in itertools.chain.from_iterable(self._parameters):
            parameter.requires_grad_(True)


@dataclass(eq=False)
class Short(Rival):
    """'short': plain training with a share of the steps of each epoch.

    Each epoch ends after that share of its batches, drawn in the same order, and the whole schedule of the learning
    rate is gone through in the steps that are left.
    """

    options: ClassVar[dict[str, Option]] = {
        "share": Option(None, "a number from 0.001 to below 1", is_number(0.001, 1, below=True)),
    }

    @classmethod
    def shorten(cls, training: Training, values: Mapping[str, Any]) -> Training:
        """Return the training with fewer steps."""
        loader, num_full = training.loader, len(training.loader)
        num_kept = max(1, round(values["share"] * num_full))
        fewer: Any = FewerBatches(cast(Any, loader.batch_sampler), num_kept)
        return dataclasses.replace(
            training,
            loader=DataLoader(
                loader.dataset,
                batch_sampler=fewer,
                num_workers=loader.num_workers,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
                worker_init_fn=loader.worker_init_fn,
                generator=loader.generator,
            ),
            scheduler=cast(LRScheduler, FasterScheduler(training.scheduler, num_full, num_kept)),
        )


class FewerBatches(Sampler[list[int]]):
    """The first batches of each epoch."""

    def __init__(self, batch_sampler: Sampler[list[int]], count: int) -> None:
        self.batch_sampler, self._count = batch_sampler, count

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batch_sampler), self._count)

    def __len__(self) -> int:
        return self._count


class FasterScheduler:
    """Steps another scheduler `num_full` times in `num_kept` steps of its own, spread evenly."""

    def __init__(self, scheduler: LRScheduler, num_full: int, num_kept: int) -> None:
        self._scheduler, self._num_full, self._num_kept = scheduler, num_full, num_kept
        self._done = 0

    def step(self) -> None:
        """Go on with the schedule after an optimizer step."""
        before, self._done = self._done, self._done + 1
        for _ in range(self._done * self._num_full // self._num_kept - before * self._num_full // self._num_kept):
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return where it is."""
        return {"done": self._done, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._done = state["done"]
        self._scheduler.load_state_dict(state["scheduler"])
