"""The course of a run: readings, decisions, refusals and faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from egeria.events.event import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted(Event):
    """A run was attached; everything a replay or a report needs to know of it."""

    kind: ClassVar[str] = "run_started"
    config: dict[str, Any]
    modules: list[dict[str, Any]]
    trainable: list[bool]
    """Whether each layer module had any parameter to train when the run began."""
    deepest_freeze: int
    """The largest number of front modules that may be frozen."""
    rule: str
    total_steps: int | None
    interval_steps: int
    interval_reason: str
    environment: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulesOrdered(Event):
    """The first forward ran in another order than the definition; this is the cut from here on."""

    kind: ClassVar[str] = "modules_ordered"
    modules: list[dict[str, Any]]
    trainable: list[bool]
    deepest_freeze: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeProfiled(Event):
    """Share of the forward pass' floating-point operations that each layer module takes."""

    kind: ClassVar[str] = "compute_profiled"
    forward_shares: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerChosen(Event):
    """Where evaluations are made, 'process' or 'inline', or 'none' where none are, and why."""

    kind: ClassVar[str] = "controller"
    controller: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerRestarted(Event):
    """The controller process died or hung and was replaced, for the `count`-th time."""

    kind: ClassVar[str] = "controller_restarted"
    count: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalMeasured(Event):
    """One interval of `n` steps: the mean loss, the learning rate and the pace."""

    kind: ClassVar[str] = "interval"
    evaluation: int
    loss: float | None
    """Mean of the finite training losses; None where there was none."""
    num_steps: int
    num_bad_losses: int
    learning_rate: float
    frozen: int
    iteration_wall_s: float
    """Median seconds from one step to the next, overhead of egeria excluded."""
    iteration_cpu_s: float
    gradients: list[float | None] | None = None
    """L1 norm of the gradients of each layer module, added up over the interval, where the policy needs it."""
    weight_changes: list[float | None] | None = None
    """Relative change of the weights of each layer module over the interval, where the policy needs it."""
    noise: list[float | None] | None = None
    """By how much the noise of the steps of each layer module holds the loss up, where the policy needs it."""
    way_ahead: float | None = None
    """The learning rate added up over the steps still to come, where the policy needs it and it can be foreseen."""
    last_rate: float | None = None
    """The learning rate of the last step, like `way_ahead`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlasticityRead(Event):
    """One reading of the frontmost active module, and what the policy made of it."""

    kind: ClassVar[str] = "plasticity"
    evaluation: int
    module: int
    name: str
    value: float
    smoothed: float
    slope: float | None
    tolerance: float | None
    stationary: int
    """Consecutive stationary evaluations so far."""
    wall_s: float
    cpu_s: float
    controller_cpu_s: float = 0.0
    """CPU seconds of the controller process."""
    age: int | None = None
    """Evaluations since the reference was taken from the training weights."""
    work_share: float | None = None
    """Share of the model's forward pass that the module makes; None where that could not be counted."""
    change_ahead: float | None = None
    """Plasticity against now that the module would come to by the end of the run, where the policy foresees that."""
    loss_ahead: float | None = None
    """Share of the training loss, or of its fall so far where that is more, that freezing would hold it up by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingDropped(Event):
    """An evaluation gave no usable reading; the policy never saw it."""

    kind: ClassVar[str] = "reading_dropped"
    evaluation: int
    module: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StageChanged(Event):
    """Bootstrapping ended: layer modules may freeze from here on."""

    kind: ClassVar[str] = "stage"
    stage: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleFrozen(Event):
    """Module number `module` froze; the `frozen` front modules are frozen now."""

    kind: ClassVar[str] = "frozen"
    module: int
    name: str
    frozen: int
    reason: str
    parameter_share: float
    """Share of all parameters that is frozen now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Thawed(Event):
    """Everything thawed; `window` evaluations are needed to freeze again."""

    kind: ClassVar[str] = "thawed"
    frozen_before: int
    reason: str
    window: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRefreshed(Event):
    """The reference model was made or brought up to date with the training weights."""

    kind: ClassVar[str] = "reference"
    evaluation: int
    builder: str
    wall_s: float
    cpu_s: float
    controller_wall_s: float = 0.0
    """Seconds it took the controller process."""
    controller_cpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RungTaken(Event):
    """The reference model's number format from here on; `before` is empty for the first choice."""

    kind: ClassVar[str] = "rung"
    before: str
    after: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityChecked(Event):
    """The error of the number format against the plasticity that it is there to show."""

    kind: ClassVar[str] = "fidelity"
    tap: str
    rung: str
    error: float
    """The metric between the full-precision snapshot and its quantized form, on the calibration batch."""
    plasticity: float
    """Mean of the readings since the last refresh."""
    outcome: str
    """'kept'; 'recalibrated' (activation ranges taken anew); 'escalated' to the next rung; 'exhausted': none left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalChanged(Event):
    """Evaluations cost more or less from here on, so that they are made more rarely or more often."""

    kind: ClassVar[str] = "interval_changed"
    before: int
    after: int
    """`n`, in steps."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Declined(Event):
    """The library chose not to act, and why; training goes on without that part."""

    kind: ClassVar[str] = "declined"
    what: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultCaught(Event):
    """Something of ours failed; training went on."""

    kind: ClassVar[str] = "fault"
    where: str
    error: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricLogged(Event):
    """Numbers the user logged, such as the validation accuracy."""

    kind: ClassVar[str] = "metric"
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed(Event):
    """The run went on from a saved state."""

    kind: ClassVar[str] = "resumed"
    frozen: int
    stage: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunClosed(Event):
    """The run ended; what egeria itself cost in all."""

    kind: ClassVar[str] = "run_closed"
    frozen: int
    overhead_wall_s: float
    overhead_cpu_s: float
    controller_cpu_s: float = 0.0
    """CPU seconds of the controller process, beside the training."""
