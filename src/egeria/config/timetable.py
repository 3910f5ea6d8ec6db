"""The text of a timetable: at which share of the training how many front layer modules are frozen."""

from __future__ import annotations

import itertools
import re
from typing import Any

_ENTRY = re.compile(r"(\d+(?:\.\d*)?|\.\d+):(\d+)")


def read_timetable(text: str) -> tuple[tuple[float, int], ...]:
    """Return the (share of the training done, front modules frozen from then on) that a checked text holds."""
    return tuple((float(share), int(depth)) for share, depth in (entry.split(":") for entry in text.split()))


def describe_fault(text: Any) -> str:
    """Return what is wrong with a text, to go behind what it should be; nothing where it is a timetable."""
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
