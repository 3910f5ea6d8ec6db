"""Random numbers: what they are drawn from, beginning it anew, and going on as if nothing had been
drawn.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""What objects of the user's may hold to draw from."""


MOST_OBJECTS, MOST_MEMBERS, DEEPEST = 100_000, 100, 11
"""How far the generators that an object leads to are looked for: objects that are looked at,
members of a container (longer ones hold data, not transforms), and edges from the object."""
METHODS = ("__getitem__", "__getitems__", "__call__", "forward")
LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    Tensor,
    np.ndarray,
    torch.dtype,
)


@contextmanager
def kept_random_state(model: nn.Module) -> Iterator[None]:
    """Restore the random states of Python, numpy and torch, on the CPU and the model's devices,
    after the block.
    """
    before = RandomState.current()
    try:
        with torch.random.fork_rng(devices=_accelerators(model)):
            yield
    finally:
        before.set()


@dataclass(frozen=True, slots=True)
class RandomState:
    """The random states of Python, numpy and torch on the CPU."""

    of_python: Any
    of_numpy: Any
    of_torch: Tensor

    @classmethod
    def current(cls) -> RandomState:
        """Return them as they are."""
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def set(self) -> None:
        """Go on from here: a model that draws random numbers in inference mode draws the same
        again.
        """
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        torch.set_rng_state(self.of_torch)


def seed_random_state(model: nn.Module, seed: int) -> None:
    """Begin all random numbers anew: those of Python, numpy and torch, on the CPU and the model's
    devices alone.
    """
    random.seed(seed)
    np.random.seed(seed)
    for generator in generators_of(model):
        generator.manual_seed(seed)


def random_fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Return a value that changes with every random number that Python, numpy or torch draw."""
    of_numpy: Any = np.random.get_state(legacy=False)
    of_torch = tuple(generator.get_state().numpy().tobytes() for generator in generators_of(model))
    key, position = of_numpy["state"]["key"].tobytes(), of_numpy["state"]["pos"]
    return (random.getstate(), key, position, of_numpy["has_gauss"], of_numpy["gauss"], *of_torch)


def generators_of_accelerators(model: nn.Module) -> list[torch.Generator]:
    """Return what random numbers come from on the accelerators that a model is on."""
    return [torch.cuda.default_generators[index] for index in _accelerators(model)]


def generators_of(model: nn.Module) -> list[torch.Generator]:
    """Return what torch draws from, on the CPU and on the accelerators that a model is on."""
    return [torch.default_generator, *generators_of_accelerators(model)]


def restoring(source: Any) -> Callable[[], object]:
    """Return what gives a generator, or the module of a global one, the state that it has now."""
    if isinstance(source, np.random.Generator):
        return functools.partial(setattr, source.bit_generator, "state", source.bit_generator.state)
    if isinstance(source, random.SystemRandom):
        return lambda: None  # it has no state
    if hasattr(source, "getstate"):  # Python's
        return functools.partial(source.setstate, source.getstate())
    return functools.partial(source.set_state, source.get_state())


@contextmanager
def kept_generators(*holders: Any) -> Iterator[None]:
    """Restore the generators that objects lead to, such as a loader, its data set and its
    augmentation.
    """
    held = [source for holder in holders for source in held_generators(holder).values()]
    states = [restoring(source) for source in held]
    try:
        yield
    finally:
        for restore in states:
            restore()


def held_generators(root: Any) -> dict[str, Generator]:
    """Return the generators an object holds, by the path to them, the same in every process.

    Looks into attributes, short containers, what functions, partials and methods were made with,
    and the globals that these functions name. Those out of reach (in C extensions) stay as they
    are.
    """
    found: dict[str, Generator] = {}
    seen: set[int] = set()
    waiting = deque([("", root, 0)])
    while waiting and len(seen) < MOST_OBJECTS:
        path, thing, depth = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        with suppress(Exception):  # a mapping that is closed, a proxy of nothing: it stays as it is
            if isinstance(thing, Generator):
                if not isinstance(thing, random.SystemRandom):
                    found[f"{path} {len(found)}" if path in found else path] = thing
            elif depth < DEEPEST:
                waiting += [
                    (
                        f"{path}.{name if isinstance(name, (str, int)) else type(name).__name__}",
                        member,
                        depth + 1,
                    )
                    for name, member in _members(thing)
                    if not issubclass(type(member), LEAVES)
                ]
    return found


def _members(thing: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(thing, (Mapping, list, tuple)):
        return _entries(thing)
    if isinstance(thing, functools.partial):
        return ("function", thing.func), ("arguments", thing.args), ("keywords", thing.keywords)
    if isinstance(thing, types.MethodType):
        return ("self", thing.__self__), ("function", thing.__func__)
    if isinstance(thing, types.BuiltinMethodType):  # such as the `random` of a generator
        return (("self", thing.__self__),)
    if isinstance(thing, types.FunctionType):
        return (*_members_of_function(thing), *_attributes(thing))
    methods = [vars(cls).get(name) for cls in type(thing).__mro__ for name in METHODS]
    return [
        *_attributes(thing),
        *(("method", method) for method in methods if type(method) is types.FunctionType),
    ]


def _entries(container: Any) -> list[tuple[Any, Any]]:
    if len(container) > MOST_MEMBERS:
        return []
    return list(container.items() if isinstance(container, Mapping) else enumerate(container))


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    attributes = getattr(thing, "__dict__", None)
    if isinstance(attributes, dict):
        yield from list(attributes.items())
    for cls in type(thing).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(vars(cls).get(name), types.MemberDescriptorType) and hasattr(thing, name):
                yield name, getattr(thing, name)


def _members_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for index, cell in enumerate(function.__closure__ or ()):
        try:
            yield f"cell{index}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield "defaults", function.__defaults__
    yield "keyword_defaults", function.__kwdefaults__
    for name in function.__code__.co_names:
        member = function.__globals__.get(name)
        if isinstance(member, Generator):
            yield f"global {name}", member


def _accelerators(model: nn.Module) -> list[int]:
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    return sorted({tensor.device.index or 0 for tensor in tensors if tensor.is_cuda})
