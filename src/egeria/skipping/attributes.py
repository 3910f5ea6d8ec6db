"""What modules hold in attributes of their own, and which of it was set since."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from egeria import tree

_OWN = frozenset({"training", "forward", "_parameters", "_buffers", "_modules"})
"""Tables of `nn.Module` that are looked at elsewhere, and what freezing and skipping themselves
set."""
MOST_ENTRIES = 1000
"""Of a dictionary or list that are compared: a larger one, such as a vocabulary, is taken not to
change."""


def attributes_of(modules: Mapping[str, nn.Module]) -> dict[str, tuple[Any, int | None]]:
    """Return the attributes that modules have besides their tables, by name, each
    with its length.
    """
    return {
        f"{name}.{key}".strip("."): (value, _size(value))
        for name, module in modules.items()
        for key, value in _own(module)
    }


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    return [
        (key, value)
        for key, value in vars(module).items()
        if key not in _OWN and "_hook" not in key
    ]


def set_since(
    before: Mapping[str, tuple[Any, int | None]], modules: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """Return the attributes set anew or resized, by name; those set to an equal plain value are not
    among them.
    """

    def is_same(name: str, value: Any, size: int | None) -> bool:
        own, own_size = before[name]
        return (own is value or _is_equal(own, value)) and size == own_size

    after = attributes_of(modules)
    return {
        name: value
        for name, (value, size) in after.items()
        if name not in before or not is_same(name, value, size)
    }


def _is_equal(before: Any, after: Any) -> bool:
    """Return whether a value was set to what it was; a tensor made anew counts as another one."""
    first, second = dict(tree.contents(before)), dict(tree.contents(after))
    if type(before) is not type(after) or first.keys() != second.keys() or not first:
        return False
    return all(
        value is second[name] or (tree.is_plain(value) and value == second[name])
        for name, value in first.items()
    )


def _size(value: Any) -> int | None:
    return (
        len(value)
        if isinstance(value, Collection) and not isinstance(value, (str, bytes, Tensor))
        else None
    )


class PlainAttributes:
    """The plain values that modules hold in attributes, and in dictionaries and lists that are
    attributes.

    Such as a scale, or the switch of an adapter. Those of a module are compared as one tuple, which
    looks at identity first: a few hundred take some ten microseconds.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._values: list[tuple[Any, Callable[[Any], Any], Any]] = []
        self._inside: list[tuple[Any, str, int, Callable[[Any], Any], Any]] = []
        for module in modules:
            attributes = _own(module)
            pick = _picker([key for key, value in attributes if _is_constant(value)])
            self._values.append((vars(module), pick, pick(vars(module))))
            for name, value in attributes:
                if isinstance(value, (dict, list)) and len(value) <= MOST_ENTRIES:
                    entries = value.items() if isinstance(value, dict) else enumerate(value)
                    pick = _picker([key for key, entry in entries if _is_constant(entry)])
                    self._inside.append((vars(module), name, len(value), pick, pick(value)))

    @property
    def have_changed(self) -> bool:
        """Whether one was set to another value, or is gone, or is new in a dictionary or list."""
        try:
            return any(pick(table) != values for table, pick, values in self._values) or any(
                len(table[name]) != size or pick(table[name]) != values
                for table, name, size, pick, values in self._inside
            )
        except (LookupError, TypeError):
            return True


def _is_constant(value: Any) -> bool:
    return tree.is_plain(value) or (isinstance(value, tuple) and all(map(_is_constant, value)))


def _picker(keys: Sequence[Any]) -> Callable[[Any], Any]:
    """Return what takes the values at some keys out of a table, as a tuple."""
    return itemgetter(keys[0], *keys) if keys else lambda _: ()
