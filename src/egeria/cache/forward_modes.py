"""The ways to do the forward pass of a frozen front; the stored one is a `Generation`."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from egeria.cache.samples import BatchIndices
from egeria.errors import EgeriaError, UncacheableError
from egeria.model.batch import Batch
from egeria.model.cut import LayerModule
from egeria.model.hooks import Hook, sweep
from egeria.model.undisturbed import KEPT, keeps_outside, living, restore_table
from egeria.random_state import RandomState, generators_of_accelerators
from egeria.skipping.probe import has_nan

WATCHED_FORWARDS = 16
"""Training forwards behind a new boundary whose pace is measured before anything is decided."""
REVIEWED_BATCHES = 50
"""Batches from the store after which it is asked again whether it pays."""

Moment = Any
"""Seconds by the clock of the process, or a `torch.cuda.Event` in the queue of an accelerator."""


class StaleError(EgeriaError):
    """What was prepared does not fit the training any more; the message is the reason."""


class PoisonedError(UncacheableError):
    """The output of a replayed forward has a NaN: mostly the poison that stands in for what nobody
    read before.
    """


@dataclass(slots=True)
class UserForward:
    """The user's forward of the model, and whether it ran with something of ours in the model."""

    function: Callable[[], Any]
    was_called: bool = False
    was_plain: bool = False
    """Whether the last call ran the model as it is."""

    def __call__(self, *, plain: bool = False) -> Any:
        """Make the forward."""
        self.was_called, self.was_plain = True, plain
        return self.function()

    def replayed(self, replaying: AbstractContextManager[None]) -> Any:
        """Make the forward in a block that skips the frozen layers.

        Raises:
            PoisonedError: its output has a NaN. What the block and the call raise passes through.
        """
        with replaying:
            output = self()
        if has_nan(output):
            raise PoisonedError(
                "with the frozen layers skipped the output of the model has NaN in it: it reads "
                "something that they "
                "give, and that nobody read when they were tried out"
            )
        return output


def is_users_own(failure: Exception, output: Any) -> bool:
    """Return whether a replayed forward failed for a NaN that the plain one gives too, such as a
    loss of no labels.
    """
    return isinstance(failure, PoisonedError) and has_nan(output)


class Rollback:
    """What a forward pass changes beside what it returns: random states, and buffers of layers in
    training mode.

    Also attributes of modules that are not of torch, whose own set none in a forward pass.

    Args:
        model: the model in training.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._modules = [module for module in modules if module._buffers]
        self._own = [
            module for module in modules if not type(module).__module__.startswith("torch.")
        ]
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._random: RandomState | None = None
        self._generators = generators_of_accelerators(model)
        self._drawn: list[Tensor] = []

    def save(self) -> None:
        """Save them before a pass."""
        self._random = RandomState.current()
        self._drawn = [
            generator.get_state() for generator in self._generators
        ]  # kept on the CPU: nothing waits
        self._attributes = [(module, dict(vars(module))) for module in self._own]
        tables = [module._buffers for module in self._modules if module.training]
        self._tables = [
            (table, dict(table)) for table in tables
        ]  # a pass may put another tensor there
        buffers = [buffer for table in tables for buffer in table.values() if buffer is not None]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]

    def forget(self) -> None:
        """Let go of what was saved, such as outputs that layers keep of the pass before."""
        self._attributes, self._tables, self._buffers = [], [], []

    def restore(self) -> None:
        """Give them their values from before the pass, so that it can be made again."""
        if self._random is not None:
            self._random.set()
        for generator, state in zip(self._generators, self._drawn, strict=False):
            generator.set_state(state)
        for module, attributes in self._attributes:
            restore_table(vars(module), attributes)
        for table, entries in self._tables:
            restore_table(table, entries)
        for buffer, before in self._buffers:
            buffer.data.copy_(before)


class PlainForward:
    """The forward pass as it is."""

    def forward(self, call: UserForward, batch: Batch, indices: BatchIndices | None) -> Any:
        """Call the model."""
        return call(plain=True)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(eq=False)
class TimedForward(PlainForward):
    """The forward pass as it is, timed until there is enough to decide by."""

    roots: Sequence[nn.Module] = ()
    """The submodules of the frozen front."""
    enough: int = WATCHED_FORWARDS
    """Forwards to watch."""
    _begins: list[Moment] = field(default_factory=list)
    """Of the forwards."""
    _spans: list[tuple[Moment, Moment]] = field(default_factory=list)
    """Beginning and end of the frozen front in each of them."""
    _moments: list[Moment] = field(default_factory=list)
    """Of the forward under way."""
    _accelerator: torch.device | None = None
    _model: nn.Module | None = None
    """Whose first pass shows whether it keeps tensors outside of itself."""
    _keeps_outside: bool = False

    @classmethod
    def of(cls, model: nn.Module, modules: Sequence[LayerModule], gate: str) -> TimedForward:
        """Watch a model with these layer modules frozen; with an open gate, which asks for no
        times, none are taken.
        """
        roots = [model.get_submodule(name) for module in modules for name in module.submodules]
        return cls(roots, 1 if gate == "open" else WATCHED_FORWARDS, _model=model)

    @property
    def iteration_s(self) -> float:
        """Median seconds from one forward to the next; 0 where nothing was timed. On an accelerator
        this waits.
        """
        return _median_s(list(itertools.pairwise(self._begins)))

    @property
    def prefix_s(self) -> float:
        """Median seconds from the beginning of the frozen front to its end; 0 where nothing was
        timed.
        """
        return _median_s(self._spans)

    def has_seen_enough(self, patience: int = 1) -> bool:
        """Count a forward; tell whether to decide before it is made, with `patience` times as
        many seen.
        """
        self._begins.append(_now(_one_accelerator(self.roots)))
        seen = len(self._begins) - 1
        return seen >= self.enough and (patience == 1 or seen >= patience * max(1, self.enough))

    def forward(self, call: UserForward, batch: Batch, indices: BatchIndices | None) -> Any:
        """Call the model, and time the frozen front in it."""
        if self._model is not None:
            model, self._model, before = self._model, None, living()
            output = call(plain=True)
            self._keeps_outside = keeps_outside(model, output, before)
            return output
        self._moments, self._accelerator = [], _one_accelerator(self.roots)
        try:
            for root in self.roots:
                root.register_forward_pre_hook(Hook(self, TimedForward._note_time))
                root.register_forward_hook(Hook(self, TimedForward._note_time))
            return call(plain=True)
        finally:
            self.close()
            if self._moments:
                self._spans.append((self._moments[0], self._moments[-1]))

    def check(self) -> None:
        """Raise UncacheableError if a pass of ours would leave something outside of the model."""
        if self._keeps_outside:
            raise UncacheableError(KEPT)

    def close(self) -> None:
        """Take the hooks off; can be called again after an interrupt."""
        for root in self.roots:
            sweep(root, self)

    def _note_time(self, *_: Any) -> None:
        self._moments.append(_now(self._accelerator))


@dataclass(slots=True)
class PaybackCheck:
    """Whether iterations with batches from the store are shorter than those before, once there are
    enough of them.
    """

    iteration_s: float
    """Of the iterations before; 0 where that is not known, and then nothing is said."""
    _last: float | None = None
    _durations: list[float] = field(default_factory=list)

    def note(self, is_served: bool) -> None:
        """Note a forward that begins; only those between two that were served whole count."""
        now = time.perf_counter()
        if self._last is not None and is_served:
            self._durations.append(now - self._last)
        self._last = now if is_served else None

    def complaint(self) -> str:
        """Return, once in so many batches, that they are no shorter; empty if they are."""
        if self.iteration_s <= 0 or len(self._durations) < REVIEWED_BATCHES:
            return ""
        found, self._durations = statistics.median(self._durations), []
        if found < self.iteration_s:
            return ""
        return (
            f"an iteration with stored activations takes {1e3 * found:.1f} ms, "
            f"and took {1e3 * self.iteration_s:.1f} ms with computed ones"
        )


def _one_accelerator(roots: Sequence[nn.Module]) -> torch.device | None:
    """Return the GPU that some modules are on; None where they are on none, or on several: their
    clocks are apart.
    """
    devices = {parameter.device for root in roots for parameter in root.parameters()}
    found = next(iter(devices), None)
    return found if found is not None and found.type == "cuda" and len(devices) == 1 else None


def _now(accelerator: torch.device | None) -> Moment:
    """Return the time; of an accelerator that at which it comes to this place of its queue, which
    is not waited for.
    """
    if accelerator is None:
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(accelerator))
    return event


def _median_s(pairs: Sequence[tuple[Moment, Moment]]) -> float:
    """Return the median of the seconds from the first to the second of each pair; 0 for none."""
    return statistics.median(_seconds(*pair) for pair in pairs) if pairs else 0.0


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
