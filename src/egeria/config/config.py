"""`Config`: every setting of a run, as Python, as a dictionary and as TOML."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import tomli_w

from egeria.config import groups
from egeria.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover (the standard library has it from 3.11)
    import tomli as tomllib

_PLAIN = (str, int, float, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run. The default policy is 'plan', ours; `policy.name` = 'egeria' is the
    paper's rule.

    The other defaults are the paper's where it gives a number, as each field says.

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
            found = getattr(self, name)
            if not isinstance(found, group):
                raise ConfigError(
                    f"{name} must be an egeria.config.{group.__name__}, found "
                    f"{type(found).__name__}. "
                    "Build it with its field names, or use Config.from_dict for plain "
                    "dictionaries."
                )

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Config:
        """Build from nested dictionaries, settings by name in groups by name; a group or field left
        out keeps its default.

        Raises:
            ConfigError: a group or field is unknown, or a value is outside its contract.
        """
        _refuse_unknown("the configuration", table, _GROUPS)
        built: dict[str, Any] = {}
        for name, values in table.items():
            if not isinstance(values, Mapping):
                example = {name: {fields(_GROUPS[name])[0].name: values}}
                raise ConfigError(
                    f"{name} must be a table of settings, found {values!r}. Write {example!r}, or "
                    "in TOML a setting "
                    f"below [{name}]."
                )
            _refuse_unknown(f"[{name}]", values, [entry.name for entry in fields(_GROUPS[name])])
            built[name] = _GROUPS[name](**values)
        return cls(**built)

    @classmethod
    def from_toml(cls, text: str) -> Config:
        """Build from the text of a TOML file."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"The configuration must be TOML; {error}. Correct that line."
            ) from error
        return cls.from_dict(table)

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Build from a TOML file."""
        try:
            return cls.from_toml(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The configuration must be a readable TOML file; {error}. Check the path."
            ) from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return nested dictionaries of plain values; strategy objects appear by their `repr`."""
        return {
            name: {
                key: value if isinstance(value, _PLAIN) else repr(value)
                for key, value in group.items()
            }
            for name, group in self._table().items()
        }

    def to_toml(self) -> str:
        """Return the TOML text that `from_toml` reads back to an equal configuration; it holds no
        strategy object.
        """
        table = self._table()
        for name, group in table.items():
            for key, value in group.items():
                if not isinstance(value, _PLAIN):
                    raise ConfigError(
                        f"{name}.{key} must be a plain value to be written as TOML, found "
                        f"{value!r}. "
                        f"Name a built-in one, or keep this configuration in Python."
                    )
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
    if unknown := sorted(map(repr, set(found) - set(known))):
        raise ConfigError(
            f"{where} knows {', '.join(sorted(known))}; found {', '.join(unknown)}. Check the "
            "spelling, or remove it."
        )
