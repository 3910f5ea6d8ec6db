"""Numbers as words."""

from __future__ import annotations

import math

UNKNOWN = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
_SPACE = "\N{NO-BREAK SPACE}"
_UNITS = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min"))
"""Limit in seconds, factor and name of each unit of time."""


def percent(share: float | None, *, signed: bool = False) -> str:
    """Write a share as a percentage; a dash where it is not known."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    return f"{100 * share:{'+' if signed else ''}.1f}{_SPACE}%".replace("-", _MINUS)


def duration(seconds: float | None) -> str:
    """Write seconds in the unit that reads best."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    size, sign = abs(seconds), _MINUS if seconds < 0 else ""
    for limit, factor, unit in _UNITS if size else ():
        if size < limit:
            return f"{sign}{size * factor:.3g}{_SPACE}{unit}"
    return f"{sign}{size / 3600:,.1f}{_SPACE}h" if size else f"0{_SPACE}s"


def number(value: float | None) -> str:
    """Write a number with four significant digits."""
    return UNKNOWN if value is None else f"{value:.4g}".replace("-", _MINUS)


def mebibytes(num_bytes: float) -> str:
    """Write an amount of memory."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def plural(amount: int, singular: str) -> str:
    """Write an amount of things."""
    return f"{amount:,} {singular}{'' if amount == 1 else 's'}"


def printable(text: str) -> str:
    """Replace what could steer a terminal; names and reasons come from anywhere."""
    return "".join(c if c.isprintable() else "�" for c in text.replace(_SPACE, " "))
