"""The groups of settings. Under each field: meaning, unit, and where the default comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from egeria.config import checks
from egeria.config.checks import POSITIVE, SHARE, SettingsGroup, choice, count, optional, setting

_MAKER = "the name of a policy or a callable that makes one"
_NAME_OR_MAKER = checks.satisfies(lambda x: isinstance(x, str) or callable(x), _MAKER)
_RULE = "the name of a rule or an object with a `judge` method"
_NAME_OR_RULE = checks.satisfies(lambda x: isinstance(x, str) or hasattr(x, "judge"), _RULE)
_BELOW_1 = checks.number(lambda x: 0 <= x < 1, "a number from 0 to below 1")
_ABOVE_1 = checks.number(lambda x: x > 1, "a finite number above 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig(SettingsGroup):
    """Who decides what is frozen, and the settings of each policy."""

    name: Any = setting("plan", _NAME_OR_MAKER)
    """'plan' (also as 'static'), 'linear' (evenly from `start` on), 'egeria' (the paper's rule),
    'none', or any `egeria.policy.Maker`: a callable that makes an `egeria.policy.Policy`."""
    plan: str | None = setting(None, optional(checks.wrong_plan))
    """Moment : front layer modules frozen from then on, such as "0.5:1 0.75:2", "step 500:2" or
    "epoch 2:encoder.layer.1". More than there are mean all but the last; fewer thaw the others.
    None: 'plan' draws one up."""
    start: float = setting(0.5, _BELOW_1)
    """'linear': share of the steps before which nothing freezes. Composer: 0.5."""
    pretrained: bool | str = setting("auto", checks.FLAG_OR_AUTO)
    """'plan': whether the weights come from an earlier training. 'auto' asks the normalisation
    layers, all alike before any training; a model without them counts as not pretrained."""

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        text, name = checks.PLAN_TEXT, self.name
        contract = f"{text} where policy.name is 'static'"
        checks.require(self.plan is not None or name != "static", "policy.plan", contract, None)
        is_followed = self.plan is None or name not in ("egeria", "none")
        contract = f"None where policy.name is {name!r}"
        checks.require(is_followed, "policy.plan", contract, self.plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulesConfig(SettingsGroup):
    """How the model is cut into layer modules (paper §4.2.1, §6.3)."""

    pattern: str | None = setting(None, optional(checks.regular_expression))
    """Regular expression; each submodule whose whole dotted name it matches is a layer module."""
    keep: str | None = setting(None, optional(checks.regular_expression))
    """Regular expression such as "norm|bias": parameters with it in their name never freeze."""
    target_share: float | None = setting(None, optional(SHARE))
    """Share of the parameters, vocabularies aside, that a layer module aims at. None takes 0.2
    (Figure 11's seven); for a pretrained model 0.1, with a lookup table as a module of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BootstrappingConfig(SettingsGroup):
    """When the critical period ends (paper §3)."""

    change_threshold: float = setting(0.1, SHARE)
    """Change of the mean loss between two intervals below which the stage ends. Paper: 10 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig(SettingsGroup):
    """The snapshot that activations are compared with (paper §4.1.3)."""

    precision: str = setting("auto", choice("auto", "int8", "bf16", "fp32"))
    """Number format: 'int8', 'bf16' or 'fp32'; 'auto' times each once and takes the fastest. What
    cannot be made, or is too coarse, gives way to 'fp32'."""
    device: str = setting("auto", choice("auto", "cpu", "cuda"))
    """Where it runs: 'cpu', 'cuda' (the model's own GPU), or 'auto': the CPU if a core is spare."""


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezingConfig(SettingsGroup):
    """When a layer module has converged (paper algorithm 1)."""

    tolerance_share: float = setting(0.2, POSITIVE)
    """`T` of a module as a share of its largest early slope. Paper: 20 %."""
    tolerance_readings: int = setting(3, count())
    """Slopes of a module that count as early. Paper: 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfreezingConfig(SettingsGroup):
    """When everything thaws (paper §4.2.2)."""

    rule: Any = setting("auto", _NAME_OR_RULE)
    """'auto' chooses by the scheduler; or a rule's name, or any `egeria.policy.UnfreezeRule`."""
    drop_factor: float | None = setting(None, optional(_ABOVE_1))
    """Fall of the learning rate since the frontmost freeze that thaws. None: the rule's own."""
    minimum_window = 2  # `W` is halved at each thaw, never under this


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig(SettingsGroup):
    """Skipping the frozen forward pass (paper §4.3)."""

    enabled: bool | str = setting("auto", checks.FLAG_OR_AUTO)
    """What the frozen front gives is stored and the front skipped: 'auto' in memory, where a plan
    keeps it frozen for over an epoch; true in a file, under every policy; false never. With
    `directory` set 'auto' takes a file too. Where inputs never come again it ends."""
    memory_share: float = setting(0.25, SHARE)
    """'auto': share of a host's memory free at a freeze that may be used. Our choice."""
    directory: str | None = setting(None, optional(checks.NAME))
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
