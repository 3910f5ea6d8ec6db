"""`Cache`: training passes that skip the frozen front for inputs that have come before."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from egeria.cache.boundary import Boundary
from egeria.cache.generation import Call, Generation
from egeria.cache.rows import FileStore, Store, free_memory_bytes
from egeria.config import CacheConfig
from egeria.errors import UncacheableError, brief
from egeria.events import CacheDecided
from egeria.journal import Recorder, run_directory
from egeria.model.cut import LayerModule
from egeria.model.passes import Batch, is_own_pass

WHAT = "skipping the frozen forward pass"
LEAST_EPOCHS = 1.2  # for which the front must stay frozen: the first one fills the store


@dataclass(eq=False, kw_only=True)
class Cache:
    """Makes the training passes of a model with a frozen front, and stores what the front gives.

    A failure costs the saving, not the training: from then on passes are computed.
    """

    model: nn.Module  # without wrappers
    settings: CacheConfig
    recorder: Recorder
    spend: Callable[[float, float], None]  # counts overhead: seconds of wall clock and of CPU
    directory: Path | None  # where a file may go; None where nothing is written
    num_batches: int | None  # of an epoch; None if unknown
    num_local: int  # ranks on this host, which share its memory
    _generation: Generation | None = None
    _number: int = 0  # of the generation

    def __post_init__(self) -> None:
        if self.settings.directory is not None:  # at attach: the program may change its folder
            self.directory = run_directory(self.settings.directory)

    def follow(self, modules: Sequence[LayerModule], epochs_ahead: float | None) -> None:
        """Move the boundary to the end of these frozen layer modules; delete what was stored.

        `epochs_ahead` says for how long it stays there, None if unknown.
        """
        self.close()
        if not modules:
            return
        self._number += 1
        epochs = math.inf if epochs_ahead is None else epochs_ahead
        if epochs < LEAST_EPOCHS and self.settings.gate != "open":
            self._decide(
                modules[-1].name,
                f"the boundary may move or the run end within {epochs:.1f} epochs, and storing "
                f"takes at least {LEAST_EPOCHS:g} to pay",
            )
            return
        try:
            boundary, store = Boundary(self.model, modules), self._make_store()
        except (UncacheableError, OSError) as error:
            self.refuse(modules[-1].name, str(error))
            return
        given = self.settings, self.recorder, self.num_batches
        self._generation = Generation(boundary, store, *given, self._guard)
        self._decide(boundary.name, "what the front gives is stored from here on", mode="stored")
        attributes = vars(self.model)
        attributes["forward"] = CachedForward(self, self.model, attributes.get("forward"))

    def close(self) -> None:
        """Leave the model as it was found; can be called again."""
        generation, self._generation = self._generation, None
        attributes = vars(self.model)
        found = attributes.get("forward")
        if isinstance(found, CachedForward):
            attributes.pop("forward")
            if found.own_forward is not None:
                attributes["forward"] = found.own_forward
        if generation is not None:
            generation.close(self._number)

    def refuse(self, boundary: str, reason: str) -> None:
        """Stop storing and serving; warn with the reason if the user had asked for the cache."""
        self.close()
        self._decide(boundary, reason)
        if self.settings.enabled is True:
            self.recorder.decline(WHAT, reason)

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a pass of the user's: without the front, or by the model's own forward, `call`."""
        generation, found = self._generation, None
        is_training = self.model.training and torch.is_grad_enabled() and not is_own_pass()
        if generation is None or not is_training or torch.compiler.is_compiling():
            return call()
        with self._guard(generation):
            found = generation.look_up(Batch.of_call(args, kwargs, generation.boundary.device.type))
        if found is None or self._generation is not generation:
            return call()
        return generation.make_pass(call, found)

    @contextmanager
    def _guard(self, generation: Generation) -> Iterator[None]:
        """Count the seconds of the block as overhead; an error in it ends the use of the cache."""
        begin, begin_cpu = time.perf_counter(), time.process_time()
        try:
            yield
        except Exception as error:
            if self._generation is generation:  # else it has ended within the pass
                reason = str(error)
                if not isinstance(error, UncacheableError):
                    self.recorder.fault("the activation cache", error)
                    reason = f"it failed ({brief(error)})"
                self.refuse(generation.boundary.name, reason)
        finally:
            self.spend(time.perf_counter() - begin, time.process_time() - begin_cpu)

    def _make_store(self) -> Store:
        if not self.settings.is_on_disk:
            return Store(int(free_memory_bytes() * self.settings.memory_share / self.num_local))
        if self.directory is None:
            raise UncacheableError("there is no directory for a file")
        return FileStore(self.directory, self.settings.limit_bytes)

    def _decide(self, boundary: str, reason: str, *, mode: str = "computed") -> None:
        which = {"step": self.recorder.step, "generation": self._number}
        self.recorder.write(CacheDecided(**which, boundary=boundary, mode=mode, reason=reason))


class CachedForward:
    """Replaces `forward` of a model while the cache makes its passes; copies get its own."""

    def __init__(self, cache: Cache, model: nn.Module, own_forward: Any) -> None:
        self._cache, self._model, self.own_forward = cache, model, own_forward
        self.__wrapped__: Callable[..., Any] = model.forward  # its signature is read from here

    @property
    def __code__(self) -> Any:
        """What `torch.export` asks a `forward` for."""
        return self.__wrapped__.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Have the cache make the pass."""
        return self._cache.forward(partial(self.__wrapped__, *args, **kwargs), args, kwargs)

    def __reduce__(self) -> Any:
        if self.own_forward is not None:
            return itemgetter(0), ([self.own_forward],)
        return getattr, (self._model, "forward")
