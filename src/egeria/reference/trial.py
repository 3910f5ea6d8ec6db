"""Whether a rung does what it should, on a few rows."""

from __future__ import annotations

import math

from torch import Tensor

from egeria.reference.rungs import Rung
from egeria.reference.survey import Survey

_MOST_ERROR = 0.5
_LEAST_SHARE = 1e-3


def check_rung(rung: Rung, survey: Survey | None) -> None:
    """Raise unless every tap gives what it gives in float32, but for rounding.

    Raises:
        ValueError: a tensor is missing, has another shape, is not finite or is another one altogether.
    """
    if survey is None:
        return
    readings = rung.readings(survey.batch)
    largest = _largest_size(survey)
    for tap, expected in survey.readings.items():
        found = readings[tap]
        _require_kinship(tap, found, expected)
        # Float32 is what the others are measured by, dice and all.
        if found is not None and expected is not None and rung.name != "fp32":
            _require_likeness(tap, found, expected, _LEAST_SHARE * largest)


def _require_kinship(tap: str, found: Tensor | None, expected: Tensor | None) -> None:
    if found is None or expected is None:
        if found is not expected:
            raise ValueError(f"{tap} gives {'a' if expected is None else 'no'} tensor, unlike in float32")
    elif found.shape != expected.shape:
        raise ValueError(f"{tap} has the shape {list(found.shape)}, and {list(expected.shape)} in float32")
    elif expected.isfinite().all() and not found.isfinite().all():
        raise ValueError(f"{tap} is not finite")


def _require_likeness(tap: str, found: Tensor, expected: Tensor, least_size: float) -> None:
    size = _size(expected)
    # All but zero beside the other taps, there are no digits to compare; nor are there in what overflows.
    if size <= least_size or not math.isfinite(size):
        return
    error = _size(found.double() - expected.double()) / size
    if error > _MOST_ERROR:
        raise ValueError(f"{tap} differs from float32 by {error:.0%}")


def _largest_size(survey: Survey) -> float:
    sizes = (_size(tensor) for tensor in survey.readings.values() if tensor is not None)
    return max((size for size in sizes if math.isfinite(size)), default=0.0)


def _size(tensor: Tensor) -> float:
    """Return the root of the mean square."""
    return math.sqrt(float(tensor.double().square().mean())) if tensor.numel() else 0.0


def brief(error: Exception) -> str:
    """Return the error in one line."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line[:200]}"
