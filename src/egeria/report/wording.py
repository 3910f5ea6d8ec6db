"""Numbers as words."""

from __future__ import annotations

import math

UNKNOWN = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"
_SPACE = "\N{NO-BREAK SPACE}"


def percent(share: float | None, *, signed: bool = False) -> str:
    """Write a share as a percentage; a dash where it is not known."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    return _minus(f"{100 * share:{'+' if signed else ''}.1f}{_SPACE}%")


def duration(seconds: float | None) -> str:
    """Write seconds in the unit that reads best."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    size = abs(seconds)
    sign = _MINUS if seconds < 0 else ""
    if size == 0:
        return f"0{_SPACE}s"
    for limit, factor, unit in (
        (1e-3, 1e6, "µs"),
        (1.0, 1e3, "ms"),
        (120.0, 1.0, "s"),
        (7200.0, 1 / 60, "min"),
    ):
        if size < limit:
            return f"{sign}{size * factor:.3g}{_SPACE}{unit}"
    return f"{sign}{size / 3600:,.1f}{_SPACE}h"


def number(value: float | None) -> str:
    """Write a number with four significant digits."""
    return UNKNOWN if value is None else _minus(f"{value:.4g}")


def count(value: int | None) -> str:
    """Write a whole number with its thousands apart."""
    return UNKNOWN if value is None else f"{value:,}"


def mebibytes(num_bytes: float) -> str:
    """Write an amount of memory."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def plural(amount: int, singular: str) -> str:
    """Write an amount of things."""
    return f"{amount:,} {singular}{'' if amount == 1 else 's'}"


def printable(text: str) -> str:
    """Replace what could steer a terminal; names and reasons come from anywhere."""
    return "".join(
        character if character.isprintable() else "�" for character in text.replace(_SPACE, " ")
    )


def _minus(text: str) -> str:
    return text.replace("-", _MINUS)
