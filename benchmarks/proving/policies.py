"""What stands after `--policy`: from its text to what `egeria.attach` is given.

A policy is NAME, NAME:key=value,key=value, or a TOML file with settings of egeria. A key without a
dot is a setting of the policy itself ([policy] in TOML), `group.key` one of another group. A `+` in
a text stands for a space, so that `static:schedule=0.54:2+0.79:3` needs no quotes. A comma before a
period, as in `static:schedule=0.1:1,3/4+0.8:3`, belongs to the schedule.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.proving.errors import RefusedError
from benchmarks.proving.observer import Observer

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover (the standard library has it from 3.11)
    import tomli as tomllib

PLAIN = "none"
DEFAULT = "default"
HEAD_ONLY, HALF = "head-only", "hft"
"""Rivals that the bench itself makes, without egeria, by `running.rivals`."""
RESTING = (HEAD_ONLY, HALF)
SHORT = "short"
"""Another: plain training, but shorter, by `running.rivals`."""
OBSERVER = "observer"
"""The bench's own policy for egeria: `benchmarks.proving.observer.Observer`, which measures and freezes nothing."""
LONGEST_FOLDER = 100
"""Letters of a folder's name: file systems end at 255 bytes."""
_PERIOD = r"\d+/\d"
"""What follows a comma inside of a schedule such as 0.1:1,3/4,4/2."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Who decides what freezes, and with which settings."""

    text: str
    """As it is written on the command line; of a file, its name without the ending."""
    name: str
    """'none' trains without egeria at all, as do those of `RESTING`, and 'short'; 'default' gives `attach` no policy;
    else a policy of the library, or `OBSERVER`."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Groups of settings beside the name, as `egeria.Config.from_dict` takes them."""

    @property
    def is_plain(self) -> bool:
        """Whether all of the model is trained in the whole run."""
        return self.name == PLAIN

    @property
    def rests(self) -> bool:
        """Whether a part of the model is not trained, and egeria has no part in that."""
        return self.name in RESTING

    @property
    def shortens(self) -> bool:
        """Whether training ends sooner, and egeria has no part in that."""
        return self.name == SHORT

    @property
    def is_watched(self) -> bool:
        """Whether egeria is attached."""
        return not self.is_plain and not self.rests and not self.shortens

    @property
    def schedule(self) -> str | None:
        """The schedule of 'static', where it only freezes and nothing else is set."""
        if self.name != "static" or list(self.settings) != ["policy"]:
            return None
        schedule: str = self.settings["policy"]["schedule"]
        return None if "/" in schedule else schedule

    @property
    def folder(self) -> str:
        """Name of the folder that its runs are kept in."""
        name = re.sub(r"[^\w.-]+", "_", self.text)
        if len(name) <= LONGEST_FOLDER:
            return name
        return f"{name[: LONGEST_FOLDER - 9]}-{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"

    def attach_arguments(self) -> dict[str, Any]:
        """Return what `egeria.attach` is given for this policy."""
        settings = self.settings
        if self.is_watched and self.name != DEFAULT:
            name = Observer if self.name == OBSERVER else self.name
            settings = {**settings, "policy": {"name": name, **settings.get("policy", {})}}
        return {"config": settings} if settings else {}


def parse_policies(texts: Sequence[str]) -> list[Policy]:
    """Return the policies of one or several comma-separated lists, in their order, each once.

    Raises:
        RefusedError: a text is not a policy, or two policies would share a folder.
    """
    policies = [parse_policy(text) for texts_of_one in texts for text in _split(texts_of_one)]
    folders: dict[str, Policy] = {}
    for policy in policies:
        before = folders.setdefault(policy.folder, policy)
        if before != policy:
            raise RefusedError(f"{before.text!r} and {policy.text!r} would share a folder. Name one of them otherwise.")
    return list(folders.values())


def parse_policy(text: str) -> Policy:
    """Return the policy that a text names.

    Raises:
        RefusedError: it is none.
    """
    if text.endswith(".toml"):
        return _from_file(Path(text))
    name, _, rest = text.partition(":")
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise RefusedError(f"A policy is NAME, NAME:key=value,… or a TOML file; found {text!r}. Correct it.")
    settings: dict[str, dict[str, Any]] = {}
    for piece in filter(None, re.split(rf",(?!{_PERIOD})", rest)):
        key, equals, value = piece.partition("=")
        if not equals or not re.fullmatch(r"(\w+\.)?\w+", key):
            raise RefusedError(f"A setting of a policy is key=value or group.key=value; found {piece!r} in {text!r}.")
        group, _, entry = key.rpartition(".")
        settings.setdefault(group or "policy", {})[entry] = _value(value)
    if name in (PLAIN, *RESTING) and settings:
        raise RefusedError(f"{name!r} trains without egeria and has no settings; found {text!r}. Leave them out.")
    share = settings.get("policy", {}).get("share") if list(settings) == ["policy"] else None
    if name == SHORT and not (isinstance(share, float) and 0 < share < 1):
        raise RefusedError(
            f"{SHORT!r} has the share of the steps that are left, as in 'short:share=0.75'; found {text!r}."
        )
    return Policy(text=text, name=name, settings=settings)


def parse_settings(texts: Sequence[str]) -> tuple[str, ...]:
    """Return settings for every schedule of a search.

    Raises:
        RefusedError: one is not group.key=value, or is the schedule's own.
    """
    for text in texts:
        if not re.fullmatch(r"\w+\.\w+=[^,]+", text) or text.startswith("policy."):
            raise RefusedError(
                f"A setting for all schedules is group.key=value, of another group than policy and without a comma; "
                f"found {text!r}. Correct it, such as --setting modules.target_share=0.1."
            )
    return tuple(dict.fromkeys(texts))


def _split(text: str) -> list[str]:
    """Cut a list at its commas, except at those between the settings of one policy."""
    found: list[str] = []
    for piece in text.split(","):
        if found and re.match(rf"{_PERIOD}|(\w+\.)?\w+=", piece):
            found[-1] += f",{piece}"
        else:
            found.append(piece.strip())
    return found


def _value(text: str) -> Any:
    """Read a value as TOML would; what is no TOML value is text, with `+` for spaces."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.replace("+", " ")


def _from_file(path: Path) -> Policy:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RefusedError(f"A policy's file must be readable TOML: {path}: {error}. Check the path.") from error
    if path.stem in (PLAIN, DEFAULT, SHORT, *RESTING):
        raise RefusedError(f"{path.stem!r} has a meaning of its own. Name {path} otherwise.")
    outside = [name for name, values in table.items() if not isinstance(values, dict)]
    if outside:
        raise RefusedError(f"{path} must hold groups of settings such as [policy]; found {outside} outside of one.")
    return Policy(text=path.stem, name=DEFAULT, settings=table)
