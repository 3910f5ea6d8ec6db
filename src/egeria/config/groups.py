"""The groups of settings. Under each field: meaning, unit, and where the default comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from egeria.config.checks import (
    is_number,
    require,
    require_choice,
    require_count,
    require_flag,
    require_share,
    timetable_fault,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """Who decides what is frozen, and the settings of each policy."""

    name: Any = "forecast"
    """'forecast' (ours), 'egeria' (the paper's rule), 'none', 'static', 'linear',
    'freezeout', 'autofreeze', 'skipconv', 'weight_change', 'random', or any `egeria.policy.PolicyMaker`: a callable
    that makes an `egeria.policy.Policy`."""
    schedule: str | None = None
    """'static': share of the training done : front layer modules frozen from then on, such as "0.54:2 0.9:0"."""
    start: float | None = None
    """Share of the training before which nothing freezes. None: 0.5 for 'linear', 0.1 for 'random', and `t_0` = 0.8
    for 'freezeout' (before it is squared or cubed), as in their sources; 'random' has none."""
    level: float = 1.0
    """'linear': share of the layer modules, the last one aside, that is frozen at the end. Composer: 1."""
    shape: str = "cubic"
    """'freezeout': 'linear', 'squared' or 'cubic' spacing of the layer modules. FreezeOut: cubic."""
    scaled: bool = True
    """'freezeout': a module that freezes early begins with a rate as much larger. FreezeOut: true."""
    percentile: float = 50.0
    """'autofreeze': of the changes of gradients; front modules that change less freeze. AutoFreeze: 50."""
    evaluations: int = 20
    """'autofreeze': evaluations in a run, where `plasticity.interval_steps` does not say. AutoFreeze: 20."""
    seed: int = 0
    """'random': which times are drawn."""
    limit: float = 0.01
    """'forecast': relative SP loss that a layer module may still come to by the end of the run and yet freeze: the
    share of the similarities between samples that would still change. That of an average module; see
    `egeria.policy.Forecast`. Ours, from the bench."""
    loss_limit: float = 0.0025
    """'forecast': share of the training loss, or of its fall since the critical period where that is more, that all
    frozen modules together may keep up as noise of steps when the rate falls; after a fall of the rate, a module far
    under it may change by more. Ours, from the bench: freezes predicted to keep 0.5 % of the loss kept 1.5 %, and cost
    an image classifier a point."""
    patience: int = 2
    """'forecast': readings in a row under the limit that freeze. Our choice."""

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) or callable(self.name)
        require(named, "policy.name", "the name of a policy or a callable that makes one", self.name)
        self._check_schedule()
        if self.start is not None:
            before = is_number(self.start) and 0 <= self.start < 1
            require(before, "policy.start", "a number from 0 to below 1", self.start)
        require_share("policy.level", self.level)
        require_choice("policy.shape", self.shape, ("linear", "squared", "cubic"))
        require_flag("policy.scaled", self.scaled)
        percentile = is_number(self.percentile) and 0 <= self.percentile <= 100
        require(percentile, "policy.percentile", "a number from 0 to 100", self.percentile)
        require_count("policy.evaluations", self.evaluations, at_least=2)
        require_count("policy.seed", self.seed, at_least=0)
        for name in ("limit", "loss_limit"):
            value = getattr(self, name)
            require(is_number(value) and value > 0, f"policy.{name}", "a finite number above 0", value)
        require_count("policy.patience", self.patience)

    def _check_schedule(self) -> None:
        example = 'text such as "0.54:2 0.79:3 0.9:0"'
        if self.schedule is not None:
            fault = timetable_fault(self.schedule)
            require(not fault, "policy.schedule", f"{example}{fault}", self.schedule)
        needed = self.schedule is not None or self.name != "static"
        require(needed, "policy.schedule", f"{example} where policy.name is 'static'", self.schedule)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulesConfig:
    """How the model is cut into layer modules (paper §4.2.1, §6.3)."""

    pattern: str | None = None
    """Regular expression; each submodule whose dotted name it matches in full becomes a layer module. None parses."""
    target_share: float = 0.2
    """Share of the parameters, vocabularies aside, that a layer module aims at. 0.2 gives Figure 11's seven."""
    minimum_share: float = 0.005
    """Share of the parameters, vocabularies aside, under which a run of blocks joins its neighbour. Our choice."""

    def __post_init__(self) -> None:
        require_share("modules.target_share", self.target_share)
        require_share("modules.minimum_share", self.minimum_share)
        if self.pattern is not None:
            require(_compiles(self.pattern), "modules.pattern", "a valid regular expression", self.pattern)


@dataclass(frozen=True, kw_only=True, slots=True)
class BootstrappingConfig:
    """When the critical period ends (paper §3)."""

    change_threshold: float = 0.1
    """The stage ends when the mean loss changes by less than this share between two intervals. Paper: 10 %."""

    def __post_init__(self) -> None:
        require_share("bootstrapping.change_threshold", self.change_threshold)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlasticityConfig:
    """How and how often a layer module is judged (paper eq. 1 and 2, §4.2.2)."""

    metric: Any = None
    """'sp' (the paper), 'relative_sp', 'l2', 'cosine', 'input_norm', 'cka', or any `egeria.plasticity.Metric`. None
    takes that of the policy: 'relative_sp' for 'forecast', whose limit is measured by it, else the paper's."""
    interval_steps: int | None = None
    """`n`: optimizer steps between evaluations. None derives it from `total_steps` by the paper's guideline."""
    window: int = 10
    """`W`: readings averaged, smoothed values fitted, and stationary evaluations needed. Paper: 10."""
    num_samples: int = 32
    """Samples of the mini-batch that an evaluation looks at. 32 of 128 correlate at 0.996 with all of them."""
    mode: str = "eval"
    """'eval' runs the prefix again in inference mode; 'train' takes the training activations (the paper's way)."""
    largest_map: int = 16
    """Side in pixels above which feature maps are average-pooled by powers of two before they are compared."""

    def __post_init__(self) -> None:
        named = self.metric is None or isinstance(self.metric, str) or callable(self.metric)
        require(named, "plasticity.metric", "the name of a metric or a callable", self.metric)
        require_count("plasticity.interval_steps", self.interval_steps, optional=True)
        require_count("plasticity.window", self.window, at_least=2)
        require_count("plasticity.num_samples", self.num_samples, at_least=2)
        require_choice("plasticity.mode", self.mode, ("eval", "train"))
        require_count("plasticity.largest_map", self.largest_map)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig:
    """The snapshot that activations are compared with (paper §4.1.3)."""

    precision: str = "auto"
    """Number format to begin with: 'int8', 'int8-dynamic' (the paper's for transformers), 'bf16', 'fp32'; 'auto'
    takes what is fastest on this processor. What cannot be made, or is too coarse, gives way to the next more exact."""
    device: str = "auto"
    """Where it runs: 'cpu', 'cuda' (a bf16 copy on a side stream), or 'auto': the CPU while it has a core to spare."""
    refresh_evaluations: int | None = None
    """Evaluations between refreshes from the training weights. None: every `W`, the paper's rule."""
    fidelity_share: float = 0.1
    """Its own error may be at most this share of the recent plasticity. Our choice: ten times under the signal."""

    def __post_init__(self) -> None:
        choices = ("auto", "int8", "int8-dynamic", "bf16", "fp32")
        require_choice("reference.precision", self.precision, choices)
        require_choice("reference.device", self.device, ("auto", "cpu", "cuda"))
        require_count("reference.refresh_evaluations", self.refresh_evaluations, optional=True)
        require_share("reference.fidelity_share", self.fidelity_share)


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerConfig:
    """Who evaluates, and what it may cost (paper §4.1.2)."""

    kind: str = "auto"
    """'process', 'inline', or 'auto': a process where training is on an accelerator or two cores are spare."""
    budget_share: float = 0.02
    """Share of the training time that evaluations may take from the training process; above it `n` grows. Ours."""
    load_limit: float = 0.5
    """Load of the rest of the machine, 0 to 1, above which the process waits; 1 never waits. Paper: 50 %."""
    patience_s: float = 10.0
    """Seconds after which a waiting evaluation is made whatever the load."""
    timeout_s: float = 120.0
    """Seconds without a sign of life, while it has work, after which the process is replaced."""
    restarts: int = 20
    """How often the process is replaced in a run before evaluations end."""
    queue_length: int = 4
    """Evaluations under way at a time; the next is dropped and counted."""

    def __post_init__(self) -> None:
        require_choice("controller.kind", self.kind, ("auto", "process", "inline"))
        require_share("controller.load_limit", self.load_limit)
        for name in ("budget_share", "patience_s", "timeout_s"):
            value = getattr(self, name)
            require(is_number(value) and value > 0, f"controller.{name}", "a finite number above 0", value)
        require_count("controller.restarts", self.restarts, at_least=0)
        require_count("controller.queue_length", self.queue_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezingConfig:
    """When a layer module has converged (paper algorithm 1)."""

    enabled: bool = True
    """False watches, judges and journals, but never freezes."""
    tolerance_share: float = 0.2
    """`T` of a module as a share of its largest early slope. Paper: 20 %."""
    tolerance_readings: int = 3
    """Slopes of a module that count as early. Paper: 3."""
    tied: str = "keep"
    """Weights shared with an active module: 'keep' trains them on through that module, 'freeze' freezes them too."""

    def __post_init__(self) -> None:
        require_flag("freezing.enabled", self.enabled)
        positive = is_number(self.tolerance_share) and self.tolerance_share > 0
        require(positive, "freezing.tolerance_share", "a finite number above 0", self.tolerance_share)
        require_count("freezing.tolerance_readings", self.tolerance_readings)
        require_choice("freezing.tied", self.tied, ("keep", "freeze"))


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfreezingConfig:
    """When everything thaws (paper §4.2.2)."""

    rule: Any = "auto"
    """'auto' goes by the scheduler; or the name of a rule; or any `egeria.policy.UnfreezeRule`."""
    drop_factor: float | None = None
    """Fall of the learning rate since the frontmost freeze that thaws. None: the rule's own (10 in the paper)."""
    minimum_window: int = 2
    """`W` is halved at each thaw, never under this."""

    def __post_init__(self) -> None:
        named = isinstance(self.rule, str) or hasattr(self.rule, "judge")
        require(named, "unfreezing.rule", "the name of a rule or an object with a `judge` method", self.rule)
        if self.drop_factor is not None:
            above = is_number(self.drop_factor) and self.drop_factor > 1
            require(above, "unfreezing.drop_factor", "a finite number above 1", self.drop_factor)
        require_count("unfreezing.minimum_window", self.minimum_window, at_least=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """Skipping the frozen forward pass (paper §4.3)."""

    enabled: bool = False
    """True stores what the frozen front puts out and skips it, where that pays. Needs the loader in `attach`."""
    views: int | None = None
    """Augmentation variants of a sample that are stored: 1 is the paper's fixed augmentation, 0 leaves augmentation
    free and stores nothing. None: 1 where inputs repeat, 2 where they are random, 4 where there is room and time."""
    directory: str | None = None
    """Where activations are stored, best on a fast local disk. None: in the directory of the run."""
    limit_bytes: int | None = None
    """Largest size on disk. None: `limit_share` of what is free."""
    limit_share: float = 0.5
    """Share of the free disk space that may be used. Our choice: leave as much again to others."""
    storage: str = "native"
    """'native' keeps the number format, exactly; 'fp16' halves float32; 'int8', one scale a channel, quarters it."""
    id_column: str | None = None
    """Key of the batch that names its samples, where the loader cannot. None looks for the usual names."""
    minimum_epochs: float = 2.0
    """Epochs that must be ahead before the boundary can move, or nothing is stored. Our choice."""
    gate: str = "auto"
    """'auto' stores only where it pays, by what was measured; 'open' stores wherever it can."""
    verify_batches: int = 200
    """Batches from the store between two checks against the computed activations."""

    def __post_init__(self) -> None:
        require_flag("cache.enabled", self.enabled)
        for name in ("directory", "id_column"):
            value = getattr(self, name)
            require(value is None or (isinstance(value, str) and bool(value)), f"cache.{name}", "a name", value)
        require_count("cache.views", self.views, at_least=0, optional=True)
        require_count("cache.limit_bytes", self.limit_bytes, optional=True)
        require_share("cache.limit_share", self.limit_share)
        require_choice("cache.storage", self.storage, ("native", "fp16", "int8"))
        epochs = is_number(self.minimum_epochs) and self.minimum_epochs >= 0
        require(epochs, "cache.minimum_epochs", "a finite number, 0 or above", self.minimum_epochs)
        require_choice("cache.gate", self.gate, ("auto", "open"))
        require_count("cache.verify_batches", self.verify_batches)


def _compiles(pattern: object) -> bool:
    if not isinstance(pattern, str):
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True
