"""Every source of random numbers that a data set and its transforms may draw from: found, seeded, put back."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

MAX_OBJECTS = 500
MAX_MEMBERS = 64  # longer containers hold data, not transforms
MAX_DEPTH = 8
METHODS = ("__getitem__", "__getitems__", "__call__", "forward")
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
LEAVES = (str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.Tensor, np.ndarray, torch.dtype)


def seed_of(base_seed: int, sample: int, view: int, name: str) -> int:
    """Return the seed of one source for one view of one sample, 64 bits; sources get unrelated ones."""
    text = f"{base_seed}/{sample}/{view}/{name}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


class RandomSources:
    """The global generators of Python, numpy and torch (CPU), and those that an object holds.

    Args:
        root: a data set. What it holds is looked for anew each time the states are kept, since some
            make their generators when first used, in the worker.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._held: dict[str, Any] = {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore every state after the block, whatever happens in it."""
        self._held = held_generators(self._root)
        of_python, of_numpy = random.getstate(), np.random.get_state()
        of_torch = torch.default_generator.get_state()
        held = [(generator, _state(generator)) for generator in self._held.values()]
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            torch.default_generator.set_state(of_torch)
            for generator, state in held:
                _restore(generator, state)

    def seed(self, base_seed: int, sample: int, view: int) -> None:
        """Start every source anew for one view of one sample.

        `torch.default_generator` directly: `torch.manual_seed` takes 70 times as long and touches every device.
        """
        random.seed(seed_of(base_seed, sample, view, "python"))
        np.random.seed(seed_of(base_seed, sample, view, "numpy") >> 32)
        torch.default_generator.manual_seed(seed_of(base_seed, sample, view, "torch"))
        for name, generator in self._held.items():
            _seed(generator, seed_of(base_seed, sample, view, name))


def held_generators(root: Any) -> dict[str, Any]:
    """Return the generators an object holds, by the path to them, the same in every process.

    Looks into attributes, short lists, tuples and mappings, what functions, partials and methods were
    made with, and the generators that the functions on the way name as globals of their module; to a
    bounded depth and number. Generators out of reach (inside C extensions, say) stay as they are.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = [("", root, 0)]
    while waiting and len(seen) < MAX_OBJECTS:
        path, thing, depth = waiting.pop(0)
        if isinstance(thing, LEAVES) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, GENERATORS):
            if not isinstance(thing, random.SystemRandom):
                found[path] = thing
        elif depth < MAX_DEPTH:
            waiting += [(f"{path}.{name}", member, depth + 1) for name, member in _members(thing)]
    return found


def _members(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        if type(thing) is dict and len(thing) <= MAX_MEMBERS:
            yield from ((str(name), member) for name, member in thing.items())
    elif isinstance(thing, (list, tuple)):
        if len(thing) <= MAX_MEMBERS:
            yield from ((str(index), member) for index, member in enumerate(thing))
    elif isinstance(thing, functools.partial):
        yield from (("function", thing.func), ("arguments", thing.args), ("keywords", thing.keywords))
    elif isinstance(thing, types.MethodType):
        yield from (("self", thing.__self__), ("function", thing.__func__))
    elif isinstance(thing, types.FunctionType):
        yield from _members_of_function(thing)
    else:
        yield from _attributes(thing)
        methods = [vars(cls).get(name) for cls in type(thing).__mro__ for name in METHODS]
        yield from (("method", method) for method in methods if isinstance(method, types.FunctionType))


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
        if isinstance(member, GENERATORS):
            yield f"global {name}", member


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed >> 32 if isinstance(generator, np.random.RandomState) else seed)
