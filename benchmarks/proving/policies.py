"""What stands after `--policy`: from its text to what `egeria.attach` is given.

A policy is NAME, NAME:key=value,key=value, or a TOML file with settings of egeria. A key without a dot is a setting of
the policy itself ([policy] in TOML), `group.key` one of another group. A `+` in a text stands for a space, so that
`plan:plan=0.54:2+0.79:3` needs no quotes.
"""

import hashlib
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.proving import RefusedError
from benchmarks.rivals import PLAIN, RIVALS, check_rival

DEFAULT = "default"
PLANS = ("plan", "static")
"""Names of policies that follow a text, given as `plan` or, of old, as `schedule`."""
LONGEST_FOLDER = 100
"""Letters of a folder's name: file systems end at 255 bytes."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Who decides what freezes, and with which settings."""

    text: str
    """As it is written on the command line; of a file, its name without the ending."""
    name: str
    """One of `RIVALS` trains without egeria; 'default' gives `attach` no policy; else a policy of the library."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Groups of settings beside the name, as `egeria.Config.from_dict` takes them."""

    @property
    def is_plain(self) -> bool:
        """Whether all of the model is trained in the whole run."""
        return self.name == PLAIN

    @property
    def is_watched(self) -> bool:
        """Whether egeria is attached."""
        return self.name not in RIVALS

    @property
    def folder(self) -> str:
        """Name of the folder that its runs are kept in."""
        name = re.sub(r"[^\w.-]+", "_", self.text)
        if len(name) <= LONGEST_FOLDER:
            return name
        return f"{name[: LONGEST_FOLDER - 9]}-{hashlib.sha256(self.text.encode()).hexdigest()[:8]}"

    def attach_arguments(self) -> dict[str, Any]:
        """Return what `egeria.attach` is given for this policy."""
        if self.name == DEFAULT:
            return {"config": self.settings} if self.settings else {}
        own = dict(self.settings.get("policy", {}))
        if self.name not in PLANS:
            return {"config": {**self.settings, "policy": {"name": self.name, **own}}}
        plan = own.pop("plan", own.pop("schedule", None))
        settings = {**self.settings, "policy": own}
        return {"plan": plan, "config": {group: values for group, values in settings.items() if values}}


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
    for piece in filter(None, rest.split(",")):
        key, equals, value = piece.partition("=")
        if not equals or not re.fullmatch(r"(\w+\.)?\w+", key):
            raise RefusedError(f"A setting of a policy is key=value or group.key=value; found {piece!r} in {text!r}.")
        group, _, entry = key.rpartition(".")
        settings.setdefault(group or "policy", {})[entry] = _value(value)
    if name in RIVALS:
        check_rival(name, settings)
    own = settings.get("policy", {})
    if name in PLANS and not isinstance(own.get("plan", own.get("schedule")), str):
        raise RefusedError(f"{name!r} follows a plan, as in '{name}:plan=0.5:1+0.75:2'; found {text!r}. Give it one.")
    return Policy(text=text, name=name, settings=settings)


def _split(text: str) -> list[str]:
    """Cut a list at its commas, except at those between the settings of one policy."""
    found: list[str] = []
    for piece in text.split(","):
        if found and re.match(r"(\w+\.)?\w+=", piece):
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
    if path.stem in (DEFAULT, *RIVALS):
        raise RefusedError(f"{path.stem!r} has a meaning of its own. Name {path} otherwise.")
    outside = [name for name, values in table.items() if not isinstance(values, dict)]
    if outside:
        raise RefusedError(f"{path} must hold groups of settings such as [policy]; found {outside} outside of one.")
    return Policy(text=path.stem, name=DEFAULT, settings=table)
