"""Rules for settings; what breaks one raises `ConfigError` with contract, value found and next
step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from egeria.errors import ConfigError

Rule = Callable[[Any], str]
"""Returns what a value would have to be; empty where it is that."""
Value = TypeVar("Value")
TIMETABLE = 'text such as "0.54:2 0.79:3 0.9:0"'
PERIODS = (2, 4, 8, 16, 32, 64)
"""Every how many optimizer steps a layer module may be updated, if not at each."""
_ENTRY = re.compile(r"(\d+\.?\d*|\.\d+):\d+(/\d+)?(,\d+/\d+)*")


class Front(NamedTuple):
    """What becomes of the front layer modules at an entry of a timetable."""

    frozen: int = 0
    """How many are frozen."""
    periods: tuple[int, ...] = ()
    """For each, front to back, how many optimizer steps lie between updates; those of frozen ones
    mean nothing."""


class SettingsGroup:
    """The fields of a group, each made by `setting`, are checked when it is built."""

    __slots__ = ()

    def __post_init__(self) -> None:
        group = type(self).__name__.removesuffix("Config").lower()
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # each group is a dataclass
            check(f"{group}.{field.name}", getattr(self, field.name), field.metadata["rule"])


def setting(default: Value, rule: Rule) -> Value:
    """Return the field of a group that has this default and keeps this rule."""
    return dataclasses.field(default=default, metadata={"rule": rule})


def check(name: str, value: Any, rule: Rule) -> None:
    """Raise `ConfigError` where the value of a setting breaks its rule."""
    contract = rule(value)
    require(not contract, name, contract, value)


def require(holds: bool, setting: str, contract: str, found: object) -> None:
    """Raise `ConfigError` unless the contract of the setting holds."""
    if not holds:
        raise ConfigError(
            f"{setting} must be {contract}, found {found!r}. "
            f"Correct it where the configuration is built or in its TOML file."
        )


def satisfies(holds: Callable[[Any], bool], contract: str) -> Rule:
    """Return the rule that a condition holds."""
    return lambda value: "" if holds(value) else contract


def optional(rule: Rule) -> Rule:
    """Return the rule that allows None too."""
    return lambda value: "" if value is None else rule(value)


def name_or(holds: Callable[[Any], bool], contract: str) -> Rule:
    """Return the rule for a name, or an object that does as well."""
    return satisfies(lambda value: isinstance(value, str) or holds(value), contract)


def number(within: Callable[[float], bool], contract: str) -> Rule:
    """Return the rule for a finite int or float within limits; a bool is none."""
    return satisfies(
        lambda value: _is_a(value, (int, float)) and math.isfinite(value) and within(value),
        contract,
    )


def count(at_least: int = 1) -> Rule:
    """Return the rule for a whole number of at least `at_least`."""
    return satisfies(
        lambda value: _is_a(value, int) and value >= at_least,
        f"a whole number of at least {at_least}",
    )


def choice(*names: str) -> Rule:
    """Return the rule for one of the names."""
    listed = ", ".join(map(repr, sorted(names)))
    return satisfies(lambda value: isinstance(value, str) and value in names, f"one of {listed}")


def flag_or(name: str) -> Rule:
    """Return the rule for true, false or a name."""
    return satisfies(
        lambda value: isinstance(value, bool) or value == name, f"true, false or {name!r}"
    )


FLAG = satisfies(lambda value: isinstance(value, bool), "true or false")
NAME = satisfies(lambda value: isinstance(value, str) and bool(value), "a name")
SHARE = number(lambda value: 0 < value <= 1, "a number above 0 and at most 1")
POSITIVE = number(lambda value: value > 0, "a finite number above 0")


def regular_expression(value: Any) -> str:
    """Rule for a text that compiles."""
    contract = "a valid regular expression"
    try:
        return "" if isinstance(value, str) and re.compile(value) else contract
    except (re.error, OverflowError, RecursionError):
        return contract


def timetable(text: Any) -> str:
    """Rule for shares of the training with what is frozen, or updated more rarely, from then on."""
    if not isinstance(text, str) or not text.split():
        return f"{TIMETABLE}, share of the training : front layer modules frozen from then on"
    malformed = [entry for entry in text.split() if not _ENTRY.fullmatch(entry)]
    if malformed:
        return (
            f"{TIMETABLE}, where {malformed[0]!r} is no share of the training : number of "
            "layer modules"
        )
    if wrong := next(filter(None, map(_wrong_parts, text.split())), ""):
        return f"{TIMETABLE}, {wrong}"
    shares = [share for share, _ in read_timetable(text)]
    if max(shares) >= 1:
        return f"{TIMETABLE}, with shares of the training below 1 and not {max(shares):g}"
    if any(later <= earlier for earlier, later in itertools.pairwise(shares)):
        return f"{TIMETABLE}, with shares of the training that rise from entry to entry"
    return ""


def read_timetable(text: str) -> tuple[tuple[float, Front], ...]:
    """Return the (share of the training done, front layer modules from then on) that a checked text
    holds.
    """
    return tuple((float(entry.split(":")[0]), _read_front(entry)) for entry in text.split())


def _parts(entry: str) -> list[tuple[int, int]]:
    """Return the (front modules, period) of an entry such as "0.1:1,3/4", with 0 as the period of
    frozen ones.
    """
    pairs = (part.partition("/") for part in entry.split(":")[1].split(","))
    return [(int(depth), int(period or 0)) for depth, _, period in pairs]


def _wrong_parts(entry: str) -> str:
    """Return what the parts of an entry would have to be; empty where they are that."""
    parts = _parts(entry)
    depths, periods = [depth for depth, _ in parts], [period for _, period in parts if period]
    if any(period not in PERIODS for period in periods):
        return (
            f"where {entry!r} has a period that is none of {', '.join(map(str, PERIODS))} "
            "optimizer steps"
        )
    if any(behind <= front for front, behind in itertools.pairwise(depths)):
        return f"where the numbers of layer modules in {entry!r} rise from part to part"
    if any(behind >= front for front, behind in itertools.pairwise(periods)):
        return f"where the periods in {entry!r} fall from part to part"
    return ""


def _read_front(entry: str) -> Front:
    parts, periods = _parts(entry), list[int]()
    for depth, period in parts:
        periods += [period] * (depth - len(periods))
    frozen = parts[0][0] if parts[0][1] == 0 else 0
    return Front(frozen, (*([max(periods[frozen:], default=1)] * frozen), *periods[frozen:]))


def _is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
