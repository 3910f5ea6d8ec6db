"""What goes into a policy and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

BOOTSTRAPPING = "bootstrapping"
KNOWLEDGE_GUIDED = "knowledge-guided"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """What `n` steps of training showed."""

    step: int
    evaluation: int
    loss: float | None
    """Mean of the finite training losses; None where there was none."""
    learning_rate: float
    gradients: tuple[float | None, ...] | None = None
    """For each layer module the L1 norm of its gradients, added up over the interval; None for one that is frozen.
    None in all where the policy has no need of gradients."""
    weight_changes: tuple[float | None, ...] | None = None
    """For each layer module ||w_now - w_then|| / ||w_then|| over the interval; None for one that is frozen, and in
    the first interval. None in all where the policy has no need of weights."""
    noise: tuple[float | None, ...] | None = None
    """For each layer module by how much the noise of the optimizer's steps holds the loss up, where it trembles
    around its place; None for one that is frozen. None in all where the policy has no need of it."""
    way_ahead: float | None = None
    """The learning rate added up over the steps still to come; None where it cannot be foreseen, or is not needed."""
    last_rate: float | None = None
    """The learning rate of the last step; None like `way_ahead`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Plasticity of one layer module at one evaluation; finite."""

    step: int
    evaluation: int
    module: int
    value: float
    age: int | None = None
    """Evaluations since the snapshot it was compared with was taken; None in old journals."""
    work_share: float | None = None
    """Share of the model's forward pass that the module makes; None where that could not be counted."""
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
    """What a policy made of one reading."""

    smoothed: float
    slope: float | None = None
    tolerance: float | None = None
    stationary: int = 0
    """Consecutive stationary evaluations, this one included."""
    change_ahead: float | None = None
    """Plasticity against now that the module would come to by the end of the run, where the policy foresees that."""
    loss_ahead: float | None = None
    """Share of the training loss, or of its fall so far where that is more, that freezing would hold it up by."""
    decisions: tuple[Decision, ...] = ()
