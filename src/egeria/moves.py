"""The text of a plan, such as "0.5:1 0.75:2": checked, read, and resolved to numbers."""

import difflib
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from egeria.errors import ConfigError

PLAN_TEXT = 'text such as "0.5:1 0.75:2", "step 500:2" or "epoch 3:encoder.layer.1"'
_ENTRY = re.compile(r"(?:(?:step|epoch)\s+)?\S+")
_MOVE = re.compile(
    r"(?:step\s+(?P<step>\d{1,15})|epoch\s+(?P<epoch>\d{1,9}\.?\d*)|(?P<share>\d{1,15}\.?\d*|\.\d+))"
    r":(?:(?P<depth>\d{1,15})|(?P<name>(?=\S*[A-Za-z_])\w[\w.-]*))(?=\s|$)"
)
ROUNDING = 1e-9  # a moment must not miss a whole step by an error in the last digit
_UNITS = {"share": "shares of the steps", "step": "steps", "epoch": "epochs"}


class Move(NamedTuple):
    """One entry of a plan: from this moment on the first `depth` layer modules are frozen."""

    time: float  # share of the training's steps, from 0 to below 1; or the number of a step
    depth: int
    is_step: bool = False  # whether `time` is the number of a step

    def step(self, total_steps: int | None) -> float:
        """Return how many steps of the training are done at this moment."""
        return self.time if self.is_step else self.time * (total_steps or 0)

    def __str__(self) -> str:
        time = repr(self.time) if self.time >= 1e-4 or not self.time else f"{self.time:.12f}"
        return f"{'step ' if self.is_step else ''}{time.removesuffix('.0')}:{self.depth}"


def read_plan(text: str) -> tuple[Move, ...]:
    """Return the moves of a text that `resolve` gave."""
    return tuple(
        Move(float(found["step"] or found["share"]), int(found["depth"]), bool(found["step"]))
        for found in _MOVE.finditer(text)
        if found["depth"] and not found["epoch"]
    )


def resolve(text: str, modules: Sequence[Sequence[str]], epoch_steps: int | None) -> str:
    """Return the text of a plan with steps for epochs, and numbers for names of layer modules.

    Args:
        text: one that `wrong_plan` finds nothing wrong with.
        modules: names of the submodules in each layer module, front to back.
        epoch_steps: optimizer steps of an epoch; None where that is not known.

    Raises:
        ConfigError: a name is not one of them, or epochs have no known length.
    """

    def plain(found: re.Match[str]) -> str:
        depth = found["depth"] or _find_depth(modules, found["name"].rpartition("-")[2])
        if found["epoch"] is None:
            return f"{found[0].partition(':')[0]}:{depth}"
        if epoch_steps is None:
            raise ConfigError(
                f"A plan with epochs needs a loader that has a length, found {text!r} and none. "
                "Pass the loader to attach, or give steps or shares."
            )
        return f"step {math.ceil(float(found['epoch']) * epoch_steps - ROUNDING)}:{depth}"

    return " ".join(map(plain, _MOVE.finditer(text)))


def _find_depth(modules: Sequence[Sequence[str]], name: str) -> int:
    """Return how many layer modules there are up to and with the last one of a name.

    The name is that of a submodule or its end, such as "encoder.layer.5"; the submodule may lie in
    a layer module, or hold several.
    """
    found = dict[str, int]()  # by what stands before the name
    for depth, own in enumerate(modules, start=1):
        for held in own:
            head, match, _ = f".{held}.".partition(f".{name}.")
            if match:
                found[head] = depth
    if "" in found or len(found) == 1:
        return found.get("") or max(found.values())
    known = [held for own in modules for held in own]
    near = difflib.get_close_matches(name, known, n=2) or known[-1:]
    raise ConfigError(
        f"A plan names one submodule, found {name!r}, which is {'several' if found else 'none'}. "
        f"Give a whole name such as {near[0]!r}, or a number of layer modules."
    )


def wrong_shares(text: Any) -> str:
    """Rule for the text of a plan that needs no length of the training."""
    has_others = isinstance(text, str) and not {"step", "epoch"}.isdisjoint(text.split())
    return 'shares such as "0.5:2", no steps or epochs' if has_others else wrong_plan(text)


def wrong_plan(text: Any) -> str:
    """Rule for the text of a plan."""
    if not isinstance(text, str):
        return f"{PLAN_TEXT}: a moment, and how many layer modules are frozen from then on"
    times: dict[str, list[float]] = {unit: [] for unit in _UNITS}
    for number, entry in enumerate(_ENTRY.findall(text), start=1):
        if (found := _MOVE.fullmatch(entry)) is None:
            return f"{PLAN_TEXT}, where entry {number}, {entry!r}, is no moment:layer modules"
        unit, time = next((unit, found[unit]) for unit in _UNITS if found[unit])
        times[unit].append(float(time))
    for unit, what in _UNITS.items():
        if times[unit] != sorted(set(times[unit])):
            return f"{PLAN_TEXT}, with {what} that rise from entry to entry"
    if times["share"] and times["share"][-1] >= 1:
        return f"{PLAN_TEXT}, with shares of the steps below 1 and not {times['share'][-1]:g}"
    return ""
