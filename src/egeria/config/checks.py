"""Checks of single settings: each raises `ConfigError` with contract, value found and next step."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection
from typing import Any

from egeria.errors import ConfigError

_ENTRY = re.compile(r"(\d+(?:\.\d*)?|\.\d+):(\d+)")


def require(holds: bool, setting: str, contract: str, found: object) -> None:
    """Raise `ConfigError` unless the contract of the setting holds."""
    if not holds:
        raise ConfigError(
            f"{setting} must be {contract}, found {found!r}. "
            f"Correct it where the configuration is built or in its TOML file."
        )


def is_number(value: Any) -> bool:
    """Return whether the value is a finite int or float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_share(setting: str, value: Any) -> None:
    """Require a number in the half-open interval (0, 1]."""
    require(is_number(value) and 0 < value <= 1, setting, "a number above 0 and at most 1", value)


def require_count(setting: str, value: Any, *, at_least: int = 1, optional: bool = False) -> None:
    """Require a whole number of at least `at_least`; None too where `optional`."""
    if optional and value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= at_least, setting, f"a whole number of at least {at_least}", value)


def require_flag(setting: str, value: Any) -> None:
    """Require a bool."""
    require(isinstance(value, bool), setting, "true or false", value)


def require_choice(setting: str, value: Any, choices: Collection[str]) -> None:
    """Require one of the named choices."""
    named = isinstance(value, str) and value in choices
    require(named, setting, "one of " + ", ".join(map(repr, sorted(choices))), value)


def read_timetable(text: str) -> tuple[tuple[float, int], ...]:
    """Return the (share of the training done, front modules frozen from then on) that a checked text holds."""
    return tuple((float(share), int(depth)) for share, depth in (entry.split(":") for entry in text.split()))


def timetable_fault(text: Any) -> str:
    """Return what is wrong with the text, to be added to what is expected; empty where it is a timetable."""
    if not isinstance(text, str) or not text.split():
        return ", share of the training : front layer modules frozen from then on"
    malformed = [entry for entry in text.split() if not _ENTRY.fullmatch(entry)]
    if malformed:
        return f", where {malformed[0]!r} is no share of the training : number of layer modules"
    shares = [share for share, _ in read_timetable(text)]
    if max(shares) >= 1:
        return f", with shares of the training below 1 and not {max(shares):g}"
    if any(later <= earlier for earlier, later in itertools.pairwise(shares)):
        return ", with shares of the training that rise from entry to entry"
    return ""
