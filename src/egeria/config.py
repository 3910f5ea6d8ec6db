"""Every setting of a run: groups of them, the rules they keep, and TOML."""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

from egeria.errors import ConfigError
from egeria.moves import PLAN_TEXT, wrong_plan

Rule = Callable[[Any], str]  # returns what a value would have to be; empty where it is that
Value = TypeVar("Value")


@dataclass_transform(kw_only_default=True, frozen_default=True)
class SettingsGroup:
    """Makes a dataclass of each group; its fields, made by `setting`, are checked when built."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        group = type(self).__name__.removesuffix("Config").lower()
        for entry in fields(self):  # type: ignore[arg-type]  # each group is a dataclass
            check(f"{group}.{entry.name}", getattr(self, entry.name), entry.metadata["rule"])


def setting(default: Value, rule: Rule) -> Value:
    """Return the field of a group that has this default and keeps this rule."""
    return field(default=default, metadata={"rule": rule})


def check(name: str, value: Any, rule: Rule) -> None:
    """Raise `ConfigError` where the value of a setting breaks its rule."""
    require(not (contract := rule(value)), name, contract, value)


def require(holds: bool, setting: str, contract: str, found: object) -> None:
    """Raise `ConfigError` unless the contract of the setting holds."""
    if not holds:
        next_step = "Correct it in the code or the TOML file that sets it."
        raise ConfigError(f"{setting} must be {contract}, found {found!r}. {next_step}")


def satisfies(holds: Callable[[Any], bool], contract: str) -> Rule:
    """Return the rule that a condition holds."""
    return lambda value: "" if holds(value) else contract


def optional(rule: Rule) -> Rule:
    """Return the rule that allows None too."""
    return lambda value: "" if value is None else rule(value)


def number(within: Callable[[float], bool], contract: str) -> Rule:
    """Return the rule for a finite number within limits."""
    return satisfies(lambda x: _is_a(x, (int, float)) and math.isfinite(x) and within(x), contract)


def count(at_least: int = 1, at_most: int = 2**53) -> Rule:
    """Return the rule for a whole number within limits."""
    contract = f"a whole number of at least {at_least}"
    return satisfies(lambda value: _is_a(value, int) and at_least <= value <= at_most, contract)


def choice(*names: str) -> Rule:
    """Return the rule for one of the names."""
    listed = ", ".join(map(repr, sorted(names)))
    return satisfies(lambda value: isinstance(value, str) and value in names, f"one of {listed}")


def is_local(folder: str) -> bool:
    """Return whether a text can name a folder of this host: no URL, and a `~` only of a user."""
    return bool(re.fullmatch(r"(?!\w{2,}:/|~)[^\0]*", os.path.expanduser(folder)))  # noqa: PTH111


FLAG_OR_AUTO = satisfies(lambda x: isinstance(x, bool) or x == "auto", "true, false or 'auto'")
FOLDER = satisfies(lambda x: isinstance(x, str) and x != "" and is_local(x), "a local folder")
SHARE = number(lambda value: 0 < value <= 1, "a number above 0 and at most 1")
POSITIVE = number(lambda value: value > 0, "a finite number above 0")


def regular_expression(value: Any) -> str:
    """Rule for a text that compiles."""
    with suppress(re.error, OverflowError, RecursionError):
        if isinstance(value, str) and re.compile(value):
            return ""
    return "a valid regular expression"


def _is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


_MAKER = "the name of a policy or a callable that makes one"
_NAME_OR_MAKER = satisfies(lambda x: isinstance(x, str) or callable(x), _MAKER)
_RULE = "the name of a rule or an object with a `judge` method"
_NAME_OR_RULE = satisfies(lambda x: isinstance(x, str) or hasattr(x, "judge"), _RULE)
_BELOW_1 = number(lambda x: 0 <= x < 1, "a number from 0 to below 1")
_ABOVE_1 = number(lambda x: x > 1, "a finite number above 1")


class PolicyConfig(SettingsGroup):
    """Who decides what is frozen, and the settings of each policy."""

    name: Any = setting("plan", _NAME_OR_MAKER)
    """'plan' (also as 'static'), 'linear' (evenly from `start` on), 'egeria' (the paper's rule),
    'none', or any `egeria.policy.Maker`: a callable that makes an `egeria.policy.Policy`."""
    plan: str | None = setting(None, optional(wrong_plan))
    """Moment : front layer modules frozen from then on, such as "0.5:1 0.75:2", "step 500:2" or
    "epoch 2:encoder.layer.1". More than there are mean all but the last; fewer thaw the others.
    None: 'plan' draws one up."""
    start: float = setting(0.5, _BELOW_1)
    """'linear': share of the steps before which nothing freezes. Composer: 0.5."""
    pretrained: bool | str = setting("auto", FLAG_OR_AUTO)
    """'plan': whether the weights come from an earlier training. 'auto' asks the normalisation
    layers, all alike before any training; a model without them counts as not pretrained."""

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        where = f"where policy.name is {self.name!r}"
        is_there = self.plan is not None or self.name != "static"
        require(is_there, "policy.plan", f"{PLAN_TEXT} {where}", None)
        has_own = callable(self.name) or self.name in ("egeria", "none")
        require(self.plan is None or not has_own, "policy.plan", f"None {where}", self.plan)


class ModulesConfig(SettingsGroup):
    """How the model is cut into layer modules (paper §4.2.1, §6.3)."""

    pattern: str | None = setting(None, optional(regular_expression))
    """Regular expression; each submodule whose whole dotted name it matches is a layer module."""
    keep: str | None = setting(None, optional(regular_expression))
    """Regular expression such as "norm|bias": parameters with it in their name never freeze."""
    target_share: float | None = setting(None, optional(SHARE))
    """Share of the parameters, vocabularies aside, that a layer module aims at. None takes 0.2
    (Figure 11's seven); for a pretrained model 0.1, with a lookup table as a module of its own."""


class BootstrappingConfig(SettingsGroup):
    """When the critical period ends (paper §3)."""

    change_threshold: float = setting(0.1, SHARE)
    """Change of the mean loss between two intervals below which the stage ends. Paper: 10 %."""


class PlasticityConfig(SettingsGroup):
    """How and how often a layer module is judged (paper eq. 1 and 2, §4.2.2)."""

    interval_steps: int | None = setting(None, optional(count()))
    """`n`: optimizer steps between evaluations. None derives it from `total_steps` by the paper's
    guideline. It grows where evaluations cost more than `controller.budget_share`."""
    window: int = setting(10, count(2))
    """`W`: readings averaged, values fitted, and stationary evaluations needed. Paper: 10."""
    num_samples: int = setting(32, count(2))
    """Samples of a batch that an evaluation looks at. 32 of 128 correlate at 0.996 with all."""
    largest_map = 16  # pixels; larger feature maps are average-pooled before they are compared


class ReferenceConfig(SettingsGroup):
    """The snapshot that activations are compared with (paper §4.1.3)."""

    precision: str = setting("auto", choice("auto", "int8", "bf16", "fp32"))
    """Number format: 'int8', 'bf16' or 'fp32'; 'auto' times each once and takes the fastest. What
    cannot be made, or is too coarse, gives way to 'fp32'."""
    device: str = setting("auto", choice("auto", "cpu", "cuda"))
    """Where it runs: 'cpu', 'cuda' (the model's own GPU), or 'auto': the CPU if a core is spare."""


class ControllerConfig(SettingsGroup):
    """Who evaluates, and what it may cost (paper §4.1.2)."""

    kind: str = setting("auto", choice("auto", "process", "inline"))
    """'process', 'inline', or 'auto': a process where training is on an accelerator."""
    budget_share: float = setting(0.0075, POSITIVE)
    """Share of the training process's time for evaluations, above which `n` grows. Ours."""
    load_limit: float = setting(0.5, SHARE)
    """Load of the rest of the machine, above which the process waits; 1: never. Paper: 50 %."""
    timeout_s: float = setting(120.0, POSITIVE)
    """Seconds without an answer after which the process is given up."""


class FreezingConfig(SettingsGroup):
    """When a layer module has converged (paper algorithm 1)."""

    tolerance_share: float = setting(0.2, POSITIVE)
    """`T` of a module as a share of its largest early slope. Paper: 20 %."""
    tolerance_readings: int = setting(3, count())
    """Slopes of a module that count as early. Paper: 3."""


class UnfreezingConfig(SettingsGroup):
    """When everything thaws (paper §4.2.2)."""

    rule: Any = setting("auto", _NAME_OR_RULE)
    """'auto' chooses by the scheduler; or a rule's name, or any `egeria.policy.UnfreezeRule`."""
    drop_factor: float | None = setting(None, optional(_ABOVE_1))
    """Fall of the learning rate since the frontmost freeze that thaws. None: the rule's own."""
    minimum_window = 2  # `W` is halved at each thaw, never under this


class CacheConfig(SettingsGroup):
    """Skipping the frozen forward pass (paper §4.3)."""

    enabled: bool | str = setting("auto", FLAG_OR_AUTO)
    """Stores what the frozen front gives and skips it: 'auto' in memory, where a plan keeps it
    frozen for over an epoch, or in a file if `directory` is set; true in a file, under every
    policy; false never. It ends where inputs never come again."""
    memory_share: float = setting(0.25, SHARE)
    """'auto': share of a host's memory free at a freeze that may be used. Our choice."""
    directory: str | None = setting(None, optional(FOLDER))
    """Where the file goes, best on a fast local disk. None: in the directory of the run."""
    limit_bytes: int | None = setting(None, optional(count()))
    """Largest size of the file of each process. None: half of what is free."""
    gate: str = setting("auto", choice("auto", "open"))
    """'auto' ends where iterations do not become shorter; 'open' stores wherever it can."""
    verify_batches: int = setting(200, count())
    """Batches from the store between two checks against the computed activations."""

    @property
    def is_on_disk(self) -> bool:
        """Whether activations are stored on the disk."""
        return self.enabled is True or (self.enabled == "auto" and self.directory is not None)


_PLAIN = (str, int, float, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run; those of the rule of the paper have the paper's values as defaults.

    Raises:
        ConfigError: a value is outside its contract; the message names the field.
    """

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    modules: ModulesConfig = field(default_factory=ModulesConfig)
    bootstrapping: BootstrappingConfig = field(default_factory=BootstrappingConfig)
    plasticity: PlasticityConfig = field(default_factory=PlasticityConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    freezing: FreezingConfig = field(default_factory=FreezingConfig)
    unfreezing: UnfreezingConfig = field(default_factory=UnfreezingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        for name, group in _GROUPS.items():
            contract = f"an egeria.config.{group.__name__} (Config.from_dict takes dictionaries)"
            found = getattr(self, name)
            require(isinstance(found, group), name, contract, found)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "Config":
        """Build from nested dictionaries: settings by name, in groups by name."""
        require(isinstance(table, Mapping), "the configuration", "nested dictionaries", table)
        _refuse_unknown("the configuration", table, _GROUPS)
        built: dict[str, Any] = {}
        for name, values in table.items():
            known = [entry.name for entry in fields(_GROUPS[name])]
            if not isinstance(values, Mapping):
                what = f"{name} must be a table of settings, found {values!r}. Write"
                raise ConfigError(f"{what} { {name: {known[0]: values}} }, or it below [{name}].")
            _refuse_unknown(f"[{name}]", values, known)
            built[name] = _GROUPS[name](**values)
        return cls(**built)

    @classmethod
    def from_toml(cls, text: str) -> "Config":
        """Build from the text of a TOML file."""
        try:
            return cls.from_dict(tomllib.loads(text))
        except (tomllib.TOMLDecodeError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"The text must be TOML; {error}. Correct that line.") from error

    @classmethod
    def load(cls, path: str | Path) -> "Config":
        """Build from a TOML file."""
        try:
            if (file := Path(path).expanduser()).exists() and not file.is_file():
                raise OSError("it is no regular file")  # a pipe would be waited for
            return cls.from_toml(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(f"{path} must be a TOML file: {error}. Give one.") from error

    def to_dict(self) -> dict[str, Any]:
        """Return nested dictionaries of plain values; strategy objects appear by their `repr`."""
        found = {name: vars(getattr(self, name)) for name in _GROUPS}
        return {
            name: {k: v if isinstance(v, _PLAIN) else repr(v) for k, v in group.items()}
            for name, group in found.items()
        }


# The class of each group of settings by its name.
_GROUPS: dict[str, Any] = {entry.name: entry.default_factory for entry in fields(Config)}


def _refuse_unknown(where: str, found: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := sorted(map(str, set(found) - set(known))):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Check the spelling, or remove it."
        names, others = ", ".join(sorted(known)), ", ".join(map(repr, unknown))
        raise ConfigError(f"{where} knows {names}; found {others}. {hint}")
