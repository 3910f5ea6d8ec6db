"""A copy of a model in training, whose front freezes ever further: what each of its iterations
takes.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egeria.advice.advice import DepthCost
from egeria.advice.instruments import DeviceClock, Iteration, Laps, Marks, devices_of
from egeria.advice.source import Witness
from egeria.config import Config
from egeria.errors import ConfigError
from egeria.events import Declined, FaultCaught
from egeria.journal import read_journal
from egeria.layers.memory import Kept, gradient_bytes, optimizer_bytes
from egeria.layers.pretrained import find_trained_norms, is_mostly_trained
from egeria.session import Run, attach

Loss = Callable[[nn.Module, Any], Tensor]
NUM_BATCHES = 8
"""Different batches that the iterations take, the same ones at each depth of a round."""
SETTLING, TIMED = 1, 3
"""Iterations at each depth in each round: first those in which the change settles, then those that
are timed."""
MOST_DEPTHS = 8
"""Depths that are measured; of a model with more layer modules the others lie between these."""


@dataclass(eq=False, kw_only=True)
class CopyInTraining:
    """Trains a copy while its front freezes and thaws, and notes what each iteration takes."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    batches: Sequence[Any]
    loss: Loss
    held_bytes: int
    """In use on the accelerators before the copy was made."""
    witness: Witness
    """Of the original."""

    def __post_init__(self) -> None:
        self._devices = devices_of(self.model)
        self._clock = DeviceClock(self._devices)
        if not self.model.training:  # parts may be in inference mode on purpose
            self.model.train()
        self._seen: dict[int, list[Iteration]] = {}
        self._memory: dict[int, tuple[int | None, int, int]] = {}
        """By depth, the bytes of activations, gradients and optimizer state."""
        self._came_trained = is_mostly_trained(find_trained_norms(self.model))
        """Whether the original is cut as a model that is fine-tuned; the copy soon looks like
        one."""
        self.num_iterations = 0

    def measure(
        self, settings: Config, folder: Path, rounds: int
    ) -> tuple[tuple[str, ...], tuple[DepthCost, ...], tuple[str, ...]]:
        """Return the layer modules, what each depth costs, and what stood in the way."""
        each = SETTLING + TIMED
        with self._attached(settings, folder / "cut", {"name": "none"}, each) as run:
            for place in range(
                each
            ):  # the order in which layers run is known, and everything is warm
                self._iterate(run, self._batch(place))
                self._check_untouched()
            modules = run.modules
        depths = _spread(max(0, len(modules) - 1))
        total = rounds * len(depths) * each
        moves = (f"step {place * each}:{depth}" for place, depth in enumerate(depths * rounds))
        policy = {"name": "plan", "plan": " ".join(moves)}
        with (
            self._attached(settings, folder / "run", policy, total) as run,
            Marks(self.model, modules, self._clock if len(self._devices) < 2 else None) as marks,
        ):
            for place in range(total):
                turn, is_settled = place // (each * len(depths)), place % each >= SETTLING
                # Batches may differ in size: those of a round are the same at each depth, and so is
                # the one counted.
                batch = self._batch(turn * TIMED + place % each if is_settled else 0)
                found = self._iterate(run, batch, marks, counts_memory=not is_settled)
                if is_settled and found.depth in self._memory:
                    self._seen.setdefault(found.depth, []).append(found)
        self._check_untouched()
        costs = tuple(self._cost(depth) for depth in sorted(self._seen))
        return tuple(module.name for module in modules), costs, _obstacles(folder)

    @contextmanager
    def _attached(
        self, settings: Config, folder: Path, policy: dict[str, Any], total_steps: int
    ) -> Iterator[Run]:
        given = settings.policy.pretrained
        pretrained = self._came_trained if given == "auto" else given
        settings = replace(
            settings,
            policy=replace(settings.policy, pretrained=pretrained, **policy),
            plasticity=replace(settings.plasticity, interval_steps=SETTLING + TIMED),
            freezing=replace(settings.freezing, enabled=True),
            cache=replace(settings.cache, enabled=False),
        )
        with attach(
            self.model, self.optimizers, directory=folder, total_steps=total_steps, config=settings
        ) as run:
            yield run

    def _batch(self, place: int) -> Any:
        """Return a batch that the iteration may overwrite."""
        return copy.deepcopy(self.batches[place % len(self.batches)])

    def _iterate(
        self, run: Run, batch: Any, marks: Marks | None = None, *, counts_memory: bool = False
    ) -> Iteration:
        """Make one iteration as a loop would."""
        depth = run.frozen
        if marks is not None:
            marks.begin()
        try:
            laps, loss, activation_bytes = self._forward(batch, counts_memory)
            loss.backward()  # type: ignore[no-untyped-call]
            laps.lap()
            for optimizer in self.optimizers:
                optimizer.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            laps.lap()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "advise needs memory for a second model and optimizer state beside the first, "
                f"found {error}. Pass a "
                f"list of smaller batches; shares of the time hardly change."
            ) from error
        except Exception as error:
            raise ConfigError(
                "An iteration on the copy must run as in the loop: loss(model, batch), backward, "
                "step; found "
                f"{type(error).__name__}: {error}. Pass loss=..., which does what the loop does "
                "before loss.backward()."
            ) from error
        peak_bytes, cpu_s = laps.peak_bytes, laps.cpu_s
        run.step(loss)
        self.num_iterations += 1
        if counts_memory:
            self._memory[depth] = (activation_bytes, *self._trained_bytes())
        began, forward, backward, optimized = laps.stamps
        prefix, stored = (None, None) if marks is None else marks.prefix(depth)
        return Iteration(
            depth, (began, forward, backward, optimized), cpu_s, prefix, stored, peak_bytes
        )

    def _forward(self, batch: Any, counts_memory: bool) -> tuple[Laps, Tensor, int | None]:
        """Return the laps with that of the forward pass, the loss, and the bytes kept for the
        backward pass.
        """
        kept = Kept(self.model) if counts_memory else None
        again = copy.deepcopy(batch) if counts_memory else None
        laps = Laps(self._clock, self._devices)
        try:
            with kept or nullcontext():
                loss = self.loss(self.model, batch)
        except Exception:
            if not counts_memory:
                raise
            laps, kept = Laps(self._clock, self._devices), None  # some bear no such hooks
            loss = self.loss(self.model, again)
        laps.lap()
        return laps, loss, kept.size_bytes() if kept is not None else None

    def _check_untouched(self) -> None:
        if self.witness.is_touched:
            raise ConfigError(
                "loss must train the model that it is given and nothing else, found that "
                "gradients or buffers of the "
                "original, or of parameters outside of the model, have changed; they were put "
                "right. Use the model "
                "that loss is given, and make a criterion with parameters of its own part of the "
                "model."
            )

    def _trained_bytes(self) -> tuple[int, int]:
        """Return the bytes of gradients of what trains now, and of the optimizer
        state.
        """
        parameters = list(self.model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return gradient_bytes(trained), optimizer_bytes(self.optimizers, parameters)

    def _cost(self, depth: int) -> DepthCost:
        seen, seconds = self._seen[depth], self._clock.seconds
        laps = zip(
            *([seconds(*lap) for lap in itertools.pairwise(entry.stamps)] for entry in seen),
            strict=True,
        )
        forward_s, backward_s, optimizer_s = map(statistics.median, laps)
        prefixes = [
            math.fsum(seconds(*span) for span in entry.prefix)
            for entry in seen
            if entry.prefix is not None
        ]
        peaks = [
            entry.peak_bytes - self.held_bytes for entry in seen if entry.peak_bytes is not None
        ]
        activation_bytes, gradients, optimizer_state = self._memory[depth]
        return DepthCost(
            depth=depth,
            forward_s=forward_s,
            backward_s=backward_s,
            optimizer_s=optimizer_s,
            cpu_s=statistics.median(entry.cpu_s for entry in seen),
            prefix_s=statistics.median(prefixes) if prefixes else None,
            activation_bytes=activation_bytes,
            gradient_bytes=gradients,
            optimizer_bytes=optimizer_state,
            peak_bytes=max(peaks) if peaks else None,
            stored_bytes=next((entry.stored_bytes for entry in seen if entry.stored_bytes), None),
        )


def _spread(deepest: int) -> tuple[int, ...]:
    """Return the depths that are measured, from nothing to all that may freeze."""
    if deepest < MOST_DEPTHS:
        return tuple(range(deepest + 1))
    return tuple(
        sorted({round(deepest * place / (MOST_DEPTHS - 1)) for place in range(MOST_DEPTHS)})
    )


def _obstacles(folder: Path) -> tuple[str, ...]:
    """Return what journals say of what was declined or failed, each once."""
    found: dict[str, None] = {}
    for directory in sorted(folder.iterdir()):
        for event in read_journal(directory).events:
            if isinstance(event, Declined):
                found[f"{event.what}: {event.reason}."] = None
            elif isinstance(event, FaultCaught):
                found[f"{event.where} failed: {event.error}."] = None
    return tuple(found)
