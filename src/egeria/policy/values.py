"""The values that a policy is given and those that it returns."""

from __future__ import annotations

from dataclasses import dataclass

BOOTSTRAPPING = "bootstrapping"
KNOWLEDGE_GUIDED = "knowledge-guided"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """What was measured over `n` steps of training."""

    step: int
    evaluation: int
    loss: float | None
    """Mean of the finite training losses; None where there was none."""
    learning_rate: float
    gradients: tuple[float | None, ...] | None = None
    """For each layer module the L1 norm of its gradients, summed over the interval; None for a frozen one.
    None as a whole where the policy does not need gradients."""
    weight_changes: tuple[float | None, ...] | None = None
    """For each layer module ||w_now - w_then|| / ||w_then|| over the interval; None for a frozen one, and in the first
    interval. None as a whole where the policy does not need weights."""
    noise: tuple[float | None, ...] | None = None
    """For each layer module by how much the noise of the optimizer's steps raises the loss; None for a frozen one.
    None as a whole where the policy does not need it."""
    remaining_rate_sum: float | None = None
    """Sum of the learning rate over the steps still to come; None where it is unknown, or not needed."""
    last_rate: float | None = None
    """The learning rate of the last step; None like `remaining_rate_sum`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Plasticity of one layer module at one evaluation; finite."""

    step: int
    evaluation: int
    module: int
    value: float
    age: int | None = None
    """Evaluations since the snapshot that it was compared with; None in old journals."""
    work_share: float | None = None
    """Share of the model's forward operations that the module makes; None where they could not be counted."""
    wall_s: float = 0.0
    """Seconds the reading took in the training process: for the journal, no policy may decide by it."""
    cpu_s: float = 0.0
    """CPU seconds it took in the training process, likewise."""
    controller_cpu_s: float = 0.0
    """CPU seconds it took in the controller process, likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndBootstrapping:
    """The critical period is over: layer modules may freeze."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Freeze:
    """Freeze this layer module, the frontmost active one."""

    module: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Thaw:
    """Thaw everything and start again at the first layer module, with this window."""

    reason: str
    window: int


Decision = EndBootstrapping | Freeze | Thaw


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a policy concluded from one reading."""

    smoothed: float
    slope: float | None = None
    tolerance: float | None = None
    stationary: int = 0
    """Consecutive stationary evaluations, this one included."""
    change_ahead: float | None = None
    """Plasticity against now that the module is predicted to reach by the end of the run, where the policy predicts."""
    loss_ahead: float | None = None
    """Share of the training loss, or of its fall so far where that is more, that freezing would keep it up by."""
    decisions: tuple[Decision, ...] = ()
