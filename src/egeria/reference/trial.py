"""Whether a rung does what it should, on a few rows."""

from __future__ import annotations

from egeria.reference.rungs import Rung
from egeria.reference.survey import Survey


def check_rung(rung: Rung, survey: Survey | None) -> None:
    """Raise unless every tap gives what it gives in float32, but for rounding.

    Raises:
        ValueError: a tensor is missing, has another shape or is not finite.
    """
    if survey is None:
        return
    readings = rung.readings(survey.batch)
    for tap, expected in survey.readings.items():
        found = readings[tap]
        if found is None or expected is None:
            if found is not expected:
                raise ValueError(f"{tap} gives {'a' if expected is None else 'no'} tensor, unlike in float32")
        elif found.shape != expected.shape:
            raise ValueError(f"{tap} has the shape {list(found.shape)}, and {list(expected.shape)} in float32")
        elif expected.isfinite().all() and not found.isfinite().all():
            raise ValueError(f"{tap} is not finite")


def brief(error: Exception) -> str:
    """Return the error in one line."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line[:200]}"
