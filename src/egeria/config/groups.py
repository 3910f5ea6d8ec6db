"""The groups of settings. Under each field: meaning, unit, and where the default comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from egeria.config.checks import (
    FLAG,
    NAME,
    POSITIVE,
    SHARE,
    TIMETABLE,
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
    timetable,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig(SettingsGroup):
    """Who decides what is frozen, and the settings of each policy."""

    name: Any = setting(
        "worth", name_or(callable, "the name of a policy or a callable that makes one")
    )
    """'worth' and 'forecast' (ours), 'egeria' (the paper's rule), 'none', 'static', 'linear',
    'freezeout', 'autofreeze', 'smartfrz', 'skipconv', 'weight_change', 'random', or any
    `egeria.policy.PolicyMaker`: a callable that makes an `egeria.policy.Policy`."""
    schedule: str | None = setting(None, optional(timetable))
    """'static': share of the training done : front layer modules frozen from then on, such as
    "0.54:2 0.9:0". With periods, as in "0.1:1,3/4,4/2": the first module is frozen, the next up to
    the third are updated at every 4th optimizer step, the fourth at every 2nd."""
    start: float | None = setting(
        None, optional(number(lambda value: 0 <= value < 1, "a number from 0 to below 1"))
    )
    """Share of the training before which nothing freezes. None: 0.5 for 'linear', 0.1 for 'random',
    and `t_0` = 0.8 for 'freezeout' (before it is squared or cubed), as in their sources; 'random'
    has none."""
    level: float = setting(1.0, SHARE)
    """'linear': share of the layer modules, the last one aside, that is frozen at the end.
    Composer: 1."""
    shape: str = setting("cubic", choice("linear", "squared", "cubic"))
    """'freezeout': 'linear', 'squared' or 'cubic' spacing of the layer modules. FreezeOut:
    cubic."""
    scaled: bool = setting(True, FLAG)
    """'freezeout': a module that freezes early begins with a rate as much larger. FreezeOut:
    true."""
    percentile: float = setting(
        50.0, number(lambda value: 0 <= value <= 100, "a number from 0 to 100")
    )
    """'autofreeze': of the changes of gradients; front modules that change less freeze. AutoFreeze:
    50."""
    evaluations: int = setting(20, count(2))
    """'autofreeze' and 'smartfrz': evaluations in a run, where `plasticity.interval_steps` does not
    say. AutoFreeze:
    20. Intervals of 'smartfrz' must have at least 30 steps."""
    freeze_score: float = setting(0.5, SHARE)
    """'smartfrz': probability, as its predictor sees it, over which a layer module freezes.
    SmartFRZ: 0.5."""
    seed: int = setting(0, count(0))
    """'random': which times are drawn."""
    limit: float = setting(0.01, POSITIVE)
    """'forecast': relative SP loss that a layer module may still come to by the end of the run and
    yet freeze: the share of the similarities between samples that would still change. That of an
    average module; see `egeria.policy.forecast.Forecast`. Ours, from the bench."""
    loss_limit: float = setting(0.0025, POSITIVE)
    """'forecast': share of the fall of the training loss since the critical period that all frozen
    modules together may keep up as noise of steps when the rate falls; after a fall of the rate, a
    module far under it may change by more. Ours, from the bench: freezes predicted to keep 0.5 % of
    the loss kept 1.5 %, and cost an image classifier a point; two that kept 0.1 % of the loss, but
    0.35 % of what had been learned, cost MobileNetV2 0.4 and 0.9."""
    watched_share: float = setting(0.6, SHARE)
    """'forecast': where the learning rate falls far by the end, share of its sum over the run that
    is still to come when layer modules begin to be watched; 1 watches from the critical period on.
    At 0.6 that is after a fifth of the run. Ours: in 42 runs of the bench from scratch nothing
    froze in the first half, on handwritten digits from 0.3."""
    pretrained: bool | str = setting("auto", flag_or("auto"))
    """'worth': whether the model came trained, so that worth decides. 'auto' looks at its
    normalisation layers, whose weights and statistics are all alike before any training. Only where
    it has none this must be said."""
    worth_limit: float = setting(0.03, SHARE)
    """'worth': largest share of the measured worth, that of the last module left out, that all
    freezes together may give up, at a training loss of 1; it is divided by the root of the loss,
    and half of it at least, twice of it at most, or ten times where the loss is under 0.1 and under
    a twentieth of the first. A layer module freezes once its share, which falls with the learning
    rate, is small for the time that its freeze saves. At 1 whatever saves time freezes at once.
    Ours, from the bench: it should cost 0.01 to 0.10 points in eight fine-tunings that are not
    judged by F1, 0.07 on average, and cost 0.09 (record 0040)."""
    duty_cycle: bool = setting(False, FLAG)
    """'worth': whether front modules that are worth too much to freeze are updated at some steps
    only."""
    patience: int = setting(2, count())
    """'forecast': readings in a row under the limit that freeze. Our choice."""

    def __post_init__(self) -> None:
        SettingsGroup.__post_init__(self)
        needed = self.schedule is not None or self.name != "static"
        require(
            needed, "policy.schedule", f"{TIMETABLE} where policy.name is 'static'", self.schedule
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulesConfig(SettingsGroup):
    """How the model is cut into layer modules (paper §4.2.1, §6.3)."""

    pattern: str | None = setting(None, optional(regular_expression))
    """Regular expression; each submodule whose dotted name it matches in full becomes a layer
    module. None parses."""
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

    metric: Any = setting(None, optional(name_or(callable, "the name of a metric or a callable")))
    """'sp' (the paper), 'relative_sp', 'l2', 'cosine', 'input_norm', 'cka', or any
    `egeria.plasticity.Metric`. None takes that of the policy: 'relative_sp' for 'forecast', whose
    limit is measured by it, else the paper's."""
    interval_steps: int | None = setting(None, optional(count()))
    """`n`: optimizer steps between evaluations. None derives it from `total_steps` by the paper's
    guideline. It grows where evaluations cost more than `controller.budget_share`, and to a
    hundredth of the run where worth decides."""
    window: int = setting(10, count(2))
    """`W`: readings averaged, smoothed values fitted, and stationary evaluations needed. Paper:
    10."""
    num_samples: int = setting(32, count(2))
    """Samples of the mini-batch that an evaluation looks at. 32 of 128 correlate at 0.996 with all
    of them."""
    mode: str = setting("eval", choice("eval", "train"))
    """'eval' runs the prefix again in inference mode; 'train' takes the training activations (the
    paper's way)."""
    largest_map: int = setting(16, count())
    """Side in pixels above which feature maps are average-pooled by powers of two before they are
    compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceConfig(SettingsGroup):
    """The snapshot that activations are compared with (paper §4.1.3)."""

    precision: str = setting("auto", choice("auto", "int8", "int8-dynamic", "bf16", "fp32"))
    """Number format to begin with: 'int8', 'int8-dynamic' (the paper's for transformers), 'bf16',
    'fp32'; 'auto' takes what is fastest on this processor. What cannot be made, or is too coarse,
    gives way to the next more exact."""
    device: str = setting("auto", choice("auto", "cpu", "cuda"))
    """Where it runs: 'cpu', 'cuda' (the model's own GPU, where it is a float32 snapshot and a copy
    of that in bf16), or 'auto': the CPU while it has a core to spare."""
    refresh_evaluations: int | None = setting(None, optional(count()))
    """Evaluations between refreshes from the training weights. None: every `W`, the paper's
    rule."""
    fidelity_share: float = setting(0.1, SHARE)
    """Its own error may be at most this share of the recent plasticity. Our choice: ten times under
    the signal."""


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
    """Seconds without a sign of life, while it has work, after which the process is replaced."""
    restarts: int = setting(20, count(0))
    """How often the process is replaced in a run before evaluations end."""
    queue_length: int = setting(4, count())
    """Evaluations under way at a time; the next is dropped and counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreezingConfig(SettingsGroup):
    """When a layer module has converged (paper algorithm 1)."""

    enabled: bool = setting(True, FLAG)
    """False watches, judges and journals, but never freezes."""
    tolerance_share: float = setting(0.2, POSITIVE)
    """`T` of a module as a share of its largest early slope. Paper: 20 %."""
    tolerance_readings: int = setting(3, count())
    """Slopes of a module that count as early. Paper: 3."""
    tied: str = setting("keep", choice("keep", "freeze"))
    """Weights shared with an active module: 'keep' trains them on through that module, 'freeze'
    freezes them too."""
    landing: str = setting("none", choice("none", "average", "anneal", "both"))
    """What takes the noise of its last steps out of a module before it freezes: 'average' replaces
    its weights by their running average, if that is no worse on the loop's own batches; 'anneal'
    lowers its own learning rate to zero; 'both' does both; 'none' freezes it as it is."""
    landing_share: float = setting(0.06, SHARE)
    """Share of the training that landing takes; checking the average takes a few steps more. Where
    `total_steps` is unknown it takes ten intervals. From one run of ResNet-8, where 6 % took back a
    third of what a raw freeze cost."""


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
    memory, for inputs that come again just as they were; true on the disk (and 'auto' where
    `directory` is set), with the augmentation of samples fixed, for which `attach` needs the
    loader; false never."""
    memory_share: float = setting(0.25, SHARE)
    """'auto': share of the memory free at a freeze that may be used, by all processes of a host.
    Our choice."""
    views: int | None = setting(None, optional(count(0)))
    """Augmentation variants of a sample that are stored: 1 is the paper's fixed augmentation, 0
    leaves augmentation free and stores nothing. None: 1 where inputs repeat, 2 where they are
    random, 4 where there is room and time."""
    directory: str | None = setting(None, optional(NAME))
    """Where activations are stored, best on a fast local disk. None: in the directory of the
    run."""
    limit_bytes: int | None = setting(None, optional(count()))
    """Largest size on disk. None: `limit_share` of what is free."""
    limit_share: float = setting(0.5, SHARE)
    """Share of the free disk space that may be used. Our choice: leave as much again to others."""
    storage: str = setting("native", choice("native", "fp16", "int8"))
    """'native' keeps the number format, exactly; 'fp16' halves float32; 'int8', one scale a
    channel, quarters it."""
    id_column: str | None = setting(None, optional(NAME))
    """Key of the batch that names its samples, where the loader cannot. None looks for the usual
    names."""
    minimum_epochs: float = setting(
        2.0, number(lambda value: value >= 0, "a finite number, 0 or above")
    )
    """Epochs that must be ahead before the boundary can move, or nothing is stored. Our choice."""
    gate: str = setting("auto", choice("auto", "open"))
    """'auto' stores only where it pays, by what was measured; 'open' stores wherever it can."""
    verify_batches: int = setting(200, count())
    """Batches from the store between two checks against the computed activations."""

    @property
    def is_on_disk(self) -> bool:
        """Whether activations are stored on the disk."""
        return self.enabled is True or (self.enabled == "auto" and self.directory is not None)
