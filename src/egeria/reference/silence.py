"""Building without the warnings of what is used for it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def silence() -> Iterator[None]:
    """Let no warning be heard in the block, and leave no trace.

    `warnings.catch_warnings` would: entering and leaving it makes Python forget what it has shown, and
    whatever a user's code is to say once would be said again.
    """
    filters: Any = warnings.filters
    # Like no filter of anyone else, so that the right one is removed.
    ignore = ("ignore", None, Warning, re.compile("(?#egeria)"), 0)
    filters.insert(0, ignore)
    try:
        yield
    finally:
        with suppress(ValueError):  # the block itself may have reset all filters
            filters.remove(ignore)
