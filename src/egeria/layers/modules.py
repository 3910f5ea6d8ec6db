"""The record of one layer module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from egeria.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerModule:
    """Consecutive layers that are judged and frozen as one unit (paper §4.2.1)."""

    name: str
    """Short and unique: "layer1", or "layer3.0-layer3.2" for a part of a stage."""
    submodules: tuple[str, ...]
    """Dotted names of what belongs to it, front to back; none lies inside another."""
    parameters: tuple[str, ...]
    """Names as in `model.named_parameters()`; every parameter of a model is in exactly one module."""
    num_parameters: int
    """Elements of those parameters."""
    tap: str
    """Dotted name of the submodule whose output is the output of this module."""
    shared_parameters: tuple[str, ...] = ()
    """Those of its parameters that modules behind it use too (tied weights)."""
    reason: str
    """Why it is cut here, in one sentence."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in plain JSON types, for the journal."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> LayerModule:
        """Build a layer module from what `to_dict` gave.

        Raises:
            ConfigError: when fields are missing or unknown.
        """
        expected = {field.name for field in fields(cls)}
        if set(entry) != expected:
            raise ConfigError(
                f"A layer module must have the fields {sorted(expected)}, found {sorted(entry)}. "
                f"Read it with the version of egeria that wrote it."
            )
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
        }
        return cls(**values)
