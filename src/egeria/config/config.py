"""`Config`: every setting of a run, as Python, as a dictionary and as TOML."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import tomli_w

from egeria.config import groups
from egeria.config.checks import require
from egeria.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover (the standard library has it from 3.11)
    import tomli as tomllib

_PLAIN = (str, int, float, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run; those of the rule of the paper have the paper's values as defaults.

    Raises:
        ConfigError: a value is outside its contract; the message names the field.
    """

    policy: groups.PolicyConfig = field(default_factory=groups.PolicyConfig)
    modules: groups.ModulesConfig = field(default_factory=groups.ModulesConfig)
    bootstrapping: groups.BootstrappingConfig = field(default_factory=groups.BootstrappingConfig)
    plasticity: groups.PlasticityConfig = field(default_factory=groups.PlasticityConfig)
    reference: groups.ReferenceConfig = field(default_factory=groups.ReferenceConfig)
    controller: groups.ControllerConfig = field(default_factory=groups.ControllerConfig)
    freezing: groups.FreezingConfig = field(default_factory=groups.FreezingConfig)
    unfreezing: groups.UnfreezingConfig = field(default_factory=groups.UnfreezingConfig)
    cache: groups.CacheConfig = field(default_factory=groups.CacheConfig)

    def __post_init__(self) -> None:
        for name, group in _GROUPS.items():
            contract = f"an egeria.config.{group.__name__} (Config.from_dict takes dictionaries)"
            found = getattr(self, name)
            require(isinstance(found, group), name, contract, found)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Config:
        """Build from nested dictionaries: settings by name, in groups by name."""
        _refuse_unknown("the configuration", table, _GROUPS)
        built: dict[str, Any] = {}
        for name, values in table.items():
            known = [entry.name for entry in fields(_GROUPS[name])]
            if not isinstance(values, Mapping):
                what = f"{name} must be a table of settings, found {values!r}. Write"
                raise ConfigError(f"{what} { {name: {known[0]: values}} }, or it below [{name}].")
            _refuse_unknown(f"[{name}]", values, known)
            built[name] = _GROUPS[name](**values)
        return cls(**built)

    @classmethod
    def from_toml(cls, text: str) -> Config:
        """Build from the text of a TOML file."""
        try:
            return cls.from_dict(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"The text must be TOML; {error}. Correct that line.") from error

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Build from a TOML file."""
        try:
            return cls.from_toml(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"{path} must be a readable TOML file: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return nested dictionaries of plain values; strategy objects appear by their `repr`."""
        table = self._table()
        for group in table.values():
            group.update({k: repr(v) for k, v in group.items() if not isinstance(v, _PLAIN)})
        return table

    def to_toml(self) -> str:
        """Return the TOML text that `from_toml` reads back; strategy objects cannot be in it."""
        table = self._table()
        contract = "a plain value to be written as TOML, such as the name of a built-in one"
        for name, group in table.items():
            for key, value in group.items():
                require(isinstance(value, _PLAIN), f"{name}.{key}", contract, value)
            table[name] = {key: value for key, value in group.items() if value is not None}
        return tomli_w.dumps(table)

    def save(self, path: str | Path) -> None:
        """Write the TOML text to a file."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    def _table(self) -> dict[str, dict[str, Any]]:
        return {
            name: {entry.name: getattr(getattr(self, name), entry.name) for entry in fields(group)}
            for name, group in _GROUPS.items()
        }


_GROUPS: dict[str, Any] = {entry.name: entry.default_factory for entry in fields(Config)}
"""The class of each group of settings by its name."""


def _refuse_unknown(where: str, found: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := sorted(map(str, set(found) - set(known))):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Check the spelling, or remove it."
        names, others = ", ".join(sorted(known)), ", ".join(map(repr, unknown))
        raise ConfigError(f"{where} knows {names}; found {others}. {hint}")
