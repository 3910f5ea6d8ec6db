"""What `sensitivity` asks: one parameter of a policy at several values, and the runs that tell.

A sweep is POLICY:key=value,value,… where POLICY may have settings of its own, which stay as they are:
`egeria:controller.budget_share=1.0,plasticity.window=5,10,20`. The last key is the one that is swept. A value
that comes to the same settings as the policy without it, or the word `default`, is that policy's own run.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.proving.comparing.comparison import WorkloadComparison, compare
from benchmarks.proving.comparing.results import read_results
from benchmarks.proving.errors import RefusedError
from benchmarks.proving.policies import DEFAULT, PLAIN, Policy, parse_policies, parse_policy
from egeria.config import Config
from egeria.errors import ConfigError
from egeria.policy.catalogue import find_policy, with_metric_of_policy

FILE_NAME = "study.json"
_SWEEP = re.compile(r"(?P<name>[^:=]+)(?P<fixed>:.+,|:)(?P<key>(?:\w+\.)?\w+)=(?P<values>[^=]+)")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of a parameter."""

    label: str
    """As it is written."""
    value: Any
    """As the settings have it; None where egeria derives one from the training."""
    policy: str
    """Whose runs show it: the sweep's policy with this value."""
    is_default: bool
    """Whether the policy has it without being told."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One parameter of a policy at several values."""

    text: str
    """As it is written on the command line."""
    base: str
    """The policy without the parameter."""
    parameter: str
    default: Any
    """What the base has; None where egeria derives it, or where the base cannot do without."""
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Study:
    """All that one `sensitivity` asks. Kept beside the journals of its record, which is made from both."""

    workloads: tuple[str, ...]
    tier: str
    seeds: tuple[int, ...]
    sweeps: tuple[Sweep, ...]

    @property
    def policies(self) -> list[Policy]:
        """Plain training, then each policy of the sweeps once."""
        return parse_policies([PLAIN, *(point.policy for sweep in self.sweeps for point in sweep.points)])

    def compare(self, results: Path) -> list[WorkloadComparison]:
        """Compare the runs that it asks for, and no others.

        Raises:
            RefusedError: one of them is not finished, or two were made by different recipes.
        """
        texts = [policy.text for policy in self.policies]
        outcomes = [
            outcome
            for outcome in read_results(results, self.workloads, self.tier)
            if outcome.run.policy.text in texts and outcome.run.seed in self.seeds
        ]
        found = {(outcome.run.workload.name, outcome.run.policy.text, outcome.run.seed) for outcome in outcomes}
        for run in ((name, text, seed) for name in self.workloads for text in texts for seed in self.seeds):
            if run not in found:
                raise RefusedError(
                    f"{results} has no finished run of {run[0]}, {run[1]}, seed {run[2]}. Make it first."
                )
        return compare(outcomes, PLAIN)

    def save(self, folder: Path) -> None:
        """Write it down."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def load_study(folder: Path) -> Study:
    """Read what the record of these journals asked.

    Raises:
        RefusedError: it is not there, or is none.
    """
    try:
        record = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        sweeps = tuple(
            Sweep(**{**sweep, "points": tuple(Point(**point) for point in sweep["points"])})
            for sweep in record.pop("sweeps")
        )
        named = {name: tuple(record.pop(name)) for name in ("workloads", "seeds")}
        return Study(sweeps=sweeps, **named, **record)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise RefusedError(
            f"Without --sweep, --results must be the journals of a record of `sensitivity`, with {FILE_NAME}: {error}. "
            f"Give workloads and --sweep, or correct the path."
        ) from error


def parse_sweeps(texts: Sequence[str]) -> tuple[Sweep, ...]:
    """Return the sweeps that some texts name.

    Raises:
        RefusedError: one is none, or egeria has no such parameter or value.
    """
    return tuple(_parse(text) for text in texts)


def _parse(text: str) -> Sweep:
    found = _SWEEP.fullmatch(text)
    labels = list(dict.fromkeys(label.strip() for label in found["values"].split(","))) if found else []
    if found is None or not all(labels):
        raise RefusedError(f"A sweep is POLICY:key=value,value,… with the swept key last; found {text!r}. Correct it.")
    front, key = found["name"] + found["fixed"], found["key"]
    base = front.rstrip(":,")
    try:
        own = _settings(base)
    except ConfigError:
        own = None  # 'static' for one cannot do without its schedule
    try:
        points = [_point(label, base, own, f"{front}{key}={label}", key) for label in labels]
    except (RefusedError, ConfigError) as error:
        raise RefusedError(f"--sweep {text}: {error}") from error
    once = tuple({point.policy: point for point in reversed(points)}.values())[::-1]
    default = None if own is None else _read(own, key)
    return Sweep(text=text, base=base, parameter=key, default=default, points=once)


def _point(label: str, base: str, own: Config | None, policy: str, key: str) -> Point:
    settings = own if label == DEFAULT and own is not None else _settings(policy)
    is_default = settings == own
    return Point(label=label, value=_read(settings, key), policy=base if is_default else policy, is_default=is_default)


def _settings(policy: str) -> Config:
    """Return the settings that `attach` would be given; what is wrong with them is told now, before anything trains."""
    config = Config.from_dict(parse_policy(policy).attach_arguments().get("config", {}))
    find_policy(config.policy.name)
    return with_metric_of_policy(config)


def _read(config: Config, key: str) -> Any:
    group, _, entry = key.rpartition(".")
    try:
        return getattr(getattr(config, group or "policy"), entry)
    except AttributeError as error:
        raise RefusedError(f"egeria has no setting {entry!r} in [{group or 'policy'}]. Check the spelling.") from error
