"""The groups of settings. Under each field: meaning, unit, and where the default comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from egeria.config.checks import (
    NAME,
    PLAN_TEXT,
    POSITIVE,
    SHARE,
    SettingsGroup,
    choice,
    count,
    flag_or,
    name_or,
    number,
    optional,
    regular_expression,
    require,
    setting,
    wrong_plan,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig(SettingsGroup):
    """Who decides what is frozen, and the settings of each policy."""

    name: Any = setting(
        "plan", name_or(callable, "the name of a policy or a callable that makes one")
    )
    """'plan' (also as 'static'), 'linear' (the even plan), 'egeria' (the rule of the paper),
    'none', or any `egeria.policy.Maker`: a callable that makes an `egeria.policy.Policy`."""
    plan: str | None = setting(None, optional(wrong_plan))
    """Share of the steps : front layer modules frozen from then on, such as "0.5:1 0.75:2", or for
    an absolute step "step 500:2". More than there are mean all but the last; fewer than before
    thaw the others. None: 'plan' draws one up, by whether the model is pretrained."""
    start: float = setting(0.5, number(lambda value: 0 <= value < 1, "a number from 0 to below 1"))
    """'linear': share of the steps before which nothing freezes. Composer: 0.5."""
    pretrained: bool | str = setting("auto", flag_or("auto"))
    """'plan': whether the weights come from an earlier training. 'auto' looks at the normalisation
    layers, whose weights and statistics are all alike before any training; a model that has none
    counts as trained from scratch."""

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        needed = self.plan is not None or self.name != "static"
        require(needed, "policy.plan", f"{PLAN_TEXT} where policy.name is 'static'", self.plan)
        is_followed = self.plan is None or self.name not in ("egeria", "none")
        require(is_followed, "policy.plan", f"None where policy.name is {self.name!r}", self.plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulesConfig(SettingsGroup):
    """How the model is cut into layer modules (paper §4.2.1, §6.3)."""

    pattern: str | None = setting(None, optional(regular_expression))
    """Regular expression; each submodule whose dotted name it matches in full becomes a layer
    module. None parses."""
    keep: str | None = setting(None, optional(regular_expression))
    """Regular expression; parameters in whose full name it is found are never frozen, such as
    "norm|bias"."""
    target_share: float | None = setting(None, optional(SHARE))
    """Share of the parameters, vocabularies aside, that a layer module aims at. None takes 0.2,
    which gives Figure 11's seven; for a model that came trained 0.1, with a lookup table at its
    front as a layer module of its own."""
    minimum_share: float = setting(0.005, SHARE)
    """Share of the parameters, vocabularies aside, under which a run of blocks joins its neighbour.
    Our choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BootstrappingConfig(SettingsGroup):
    """When the critical period ends (paper §3)."""

    change_threshold: float = setting(0.1, SHARE)
    """The stage ends when the mean loss changes by less than this share between two intervals.
    Paper: 10 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlasticityConfig(SettingsGroup):
    """How and how often a layer module is judged (paper eq. 1 and 2, §4.2.2)."""

    interval_steps: int | None = setting(None, optional(count()))
    """`n`: optimizer steps between evaluations. None derives it from `total_steps` by the paper's
    guideline. It grows where evaluations cost
    more than `controller.budget_share`."""
    window: int = setting(10, count(2))
    """`W`: readings averaged, smoothed values fitted, and stationary evaluations needed. Paper:
    10."""
    num_samples: int = setting(32, count(2))
    """Samples of the mini-batch that an evaluation looks at. 32 of 128 correlate at 0.996 with all
    of them."""
    largest_map: int = setting(16, count())
    """Side in pixels above which feature maps are average-pooled by powers of two before they are
    compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig(SettingsGroup):
    """The snapshot that activations are compared with (paper §4.1.3)."""

    precision: str = setting("auto", choice("auto", "int8", "bf16", "fp32"))
    """Number format: 'int8', 'bf16' or 'fp32'; 'auto' times each once and takes the fastest. What
    cannot be made, or is too coarse, gives way to the next one, at last to 'fp32'."""
    device: str = setting("auto", choice("auto", "cpu", "cuda"))
    """Where it runs: 'cpu', 'cuda' (the model's own GPU, where it is a float32 snapshot and a copy
    of that in bf16), or 'auto': the CPU while it has a core to spare."""
    refresh_evaluations: int | None = setting(None, optional(count()))
    """Evaluations between refreshes from the training weights. None: every `W`, the paper's
    rule."""
    fidelity_share: float = setting(0.1, SHARE)
    """Its own error may be at most this share of the recent plasticity, or of 1e-4 before any is
    known. Our choice: ten times under the signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerConfig(SettingsGroup):
    """Who evaluates, and what it may cost (paper §4.1.2)."""

    kind: str = setting("auto", choice("auto", "process", "inline"))
    """'process', 'inline', or 'auto': a process where training is on an accelerator or two cores
    are spare."""
    budget_share: float = setting(0.0075, POSITIVE)
    """Share of the training time that evaluations may take from the training process; above it `n`
    grows. Ours."""
    load_limit: float = setting(0.5, SHARE)
    """Load of the rest of the machine, 0 to 1, above which the process waits; 1 never waits. Paper:
    50 %."""
    patience_s: float = setting(10.0, POSITIVE)
    """Seconds after which a waiting evaluation is made whatever the load."""
    timeout_s: float = setting(120.0, POSITIVE)
    """Seconds for an evaluation, besides the waiting, after which the process is given up."""
    queue_length: int = setting(4, count())
    """Evaluations under way at a time; the next is dropped and counted."""


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

    rule: Any = setting(
        "auto",
        name_or(
            lambda value: hasattr(value, "judge"),
            "the name of a rule or an object with a `judge` method",
        ),
    )
    """'auto' goes by the scheduler; or the name of a rule; or any `egeria.policy.UnfreezeRule`."""
    drop_factor: float | None = setting(
        None, optional(number(lambda value: value > 1, "a finite number above 1"))
    )
    """Fall of the learning rate since the frontmost freeze that thaws. None: the rule's own (10 in
    the paper)."""
    minimum_window: int = setting(2, count(2))
    """`W` is halved at each thaw, never under this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig(SettingsGroup):
    """Skipping the frozen forward pass (paper §4.3)."""

    enabled: bool | str = setting("auto", flag_or("auto"))
    """What the frozen front puts out is stored and the front skipped, where that pays: 'auto' in
    memory; true on the disk (and 'auto' where `directory` is set), for which `attach` needs the
    loader; false never. Where inputs are augmented at random nothing is stored."""
    memory_share: float = setting(0.25, SHARE)
    """'auto': share of the memory free at a freeze that may be used, by all processes of a host.
    Our choice."""
    directory: str | None = setting(None, optional(NAME))
    """Where activations are stored, in a file without a name, best on a fast local disk. None: in
    the directory of the run."""
    limit_bytes: int | None = setting(None, optional(count()))
    """Largest size on disk, of each process. None: `limit_share` of what is free."""
    limit_share: float = setting(0.5, SHARE)
    """Share of the free disk space that may be used. Our choice: leave as much again to others."""
    gate: str = setting("auto", choice("auto", "open"))
    """'auto' stores only where it pays, by what was measured; 'open' stores wherever it can."""
    verify_batches: int = setting(200, count())
    """Batches from the store between two checks against the computed activations."""

    @property
    def is_on_disk(self) -> bool:
        """Whether activations are stored on the disk."""
        return self.enabled is True or (self.enabled == "auto" and self.directory is not None)
