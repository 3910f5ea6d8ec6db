"""The generators that objects of the user's lead to."""

import random
import shelve
from types import SimpleNamespace

import numpy as np
import torch

from egeria.random_state import MOST_MEMBERS, held_generators


class Own:
    """Generators of its own, several, as in libraries of transforms."""

    __slots__ = ("bits", "generators")

    def __init__(self):
        self.generators = {"python": random.Random(3), "legacy": [np.random.RandomState(4)]}
        self.bits = (np.random.default_rng(5), np.random.Generator(np.random.Philox(6)), torch.Generator())

    def __call__(self, x):
        return x + self.generators["python"].gauss(0, 1)


class Unbound:
    def __getattribute__(self, name):
        raise RuntimeError("no object is bound to this proxy")


def test_what_cannot_be_looked_at_is_passed_over(tmp_path):
    holder = SimpleNamespace(proxy=Unbound(), generator=random.Random(0))
    with shelve.open(tmp_path / "samples") as holder.closed:
        pass
    assert list(held_generators(holder)) == [".generator"]


def test_generators_are_looked_for_within_bounds():
    holder = SimpleNamespace(data=[random.Random()] * (MOST_MEMBERS + 1), generator=random.Random())
    holder.itself, holder.secret = holder, random.SystemRandom()
    assert list(held_generators(holder)) == [".generator"]
    deep = nested = SimpleNamespace()
    for _ in range(100):
        nested.inner = SimpleNamespace()
        nested = nested.inner
    nested.generator = random.Random()
    assert held_generators(deep) == {}


def test_generators_in_closures_methods_and_slots_are_found():
    closing = np.random.default_rng()
    holder = SimpleNamespace(transform=lambda x: x + closing.normal(), method=Own().__call__)
    assert len(held_generators(holder)) == 1 + 5
