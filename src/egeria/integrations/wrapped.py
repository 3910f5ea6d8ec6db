"""A run as a framework has it: what the framework does in its own way is defined anew, the rest is
passed on.
"""

from __future__ import annotations

from typing import Any, TypeVar

from egeria.session import Run

Own = TypeVar("Own", bound="WrappedRun")


class WrappedRun:
    """An `egeria.Run`; whatever a class made of this one does not define is that of the run.

    Args:
        run: to be passed on to.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def close(self) -> None:
        """End the run and leave the model as it was found. Safe to call twice."""
        self._run.close()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._run)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copying and pickling ask for, before there is a run
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["_run"], name)
