"""What the journal of a run holds: one frozen record per kind of event.

`step` is the number of optimizer steps done so far. Times are seconds of wall clock (`wall_s`) and
of CPU (`cpu_s`) in the training process, unless the name has `controller`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NotRequired, TypeAlias, TypedDict, TypeVar, dataclass_transform

import msgspec

SCHEMA_VERSION = 1
EVENT_TYPES: "dict[str, type[Event]]" = {}  # by their names in the journal
Plain: TypeAlias = bool | int | float | str | None


class ModuleFacts(TypedDict):
    """A `LayerModule`, and how many elements of its parameters train."""

    name: str
    num_parameters: int
    num_trainable: int
    share: NotRequired[float]
    submodules: NotRequired[list[str]]
    parameters: NotRequired[list[str]]
    tap: NotRequired[str]
    reason: NotRequired[str]


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events share."""

    kind: ClassVar[str] = ""
    step: int

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        EVENT_TYPES[kind] = dataclass(frozen=True, kw_only=True)(cls)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, the kind of event first."""
        return {"event": self.kind, **dataclasses.asdict(self)}


class RunStarted(Event, kind="run_started"):
    """The model was cut, right before its first update; everything a report needs to know of it."""

    config: dict[str, dict[str, Plain]]
    modules: list[ModuleFacts]
    trainable: list[bool]  # whether each layer module had any parameter to train
    deepest_freeze: int  # the largest number of front modules that may be frozen
    rule: str  # for thaws
    total_steps: int | None
    interval_steps: int
    environment: dict[str, Plain]


class PlanMade(Event, kind="plan"):
    """How many layer modules are to be frozen from when on."""

    plan: str  # its text, as `attach` takes it; empty where nothing is to be frozen
    reason: str
    skipped_share: float | None  # of the training's compute; None where it cannot be counted


class MetricLogged(Event, kind="metric"):
    """Numbers the user logged, such as the validation accuracy."""

    values: dict[str, float]


class Resumed(Event, kind="resumed"):
    """The run was resumed from a saved state."""

    frozen: int
    stage: str


class RunClosed(Event, kind="run_closed"):
    """The run ended; what egeria itself cost in all."""

    frozen: int
    overhead_wall_s: float
    overhead_cpu_s: float
    controller_cpu_s: float = 0.0


class IntervalMeasured(Event, kind="interval"):
    """One interval of `n` steps: the mean loss, the learning rate and the time of an iteration."""

    evaluation: int
    loss: float | None  # mean of the finite training losses; None where there was none
    num_steps: int
    num_bad_losses: int
    learning_rate: float
    frozen: int
    iteration_wall_s: float  # median seconds from one step to the next, overhead of egeria excluded
    iteration_cpu_s: float
    overhead_wall_s: float = 0.0  # what egeria itself cost here so far, as in `RunClosed`
    overhead_cpu_s: float = 0.0
    memory_bytes: int | None = None  # most on CUDA since the depth changed; None on the CPU


class PlasticityRead(Event, kind="plasticity"):
    """One reading of the frontmost active module, and what the policy concluded from it."""

    evaluation: int
    module: int
    name: str
    value: float
    smoothed: float
    slope: float | None
    tolerance: float | None
    stationary: int  # consecutive stationary evaluations so far
    wall_s: float
    cpu_s: float
    controller_cpu_s: float = 0.0


class ReadingDropped(Event, kind="reading_dropped"):
    """An evaluation gave no usable reading; the policy never saw it."""

    evaluation: int
    module: int
    reason: str


class IntervalChanged(Event, kind="interval_changed"):
    """Intervals have another length from here on, by what evaluations cost or who decides."""

    before: int
    after: int
    reason: str


class StageChanged(Event, kind="stage"):
    """Bootstrapping ended: layer modules may freeze from here on."""

    stage: str
    reason: str


class ModuleFrozen(Event, kind="frozen"):
    """Module number `module` froze; the `frozen` front modules are frozen now."""

    module: int
    name: str
    frozen: int
    reason: str
    parameter_share: float  # share of the trainable parameters that is frozen now


class DepthRefused(Event, kind="depth_refused"):
    """The policy asked for a depth that was refused; it may ask again."""

    asked: int
    reason: str


class Thawed(Event, kind="thawed"):
    """Everything thawed; `window` evaluations are needed to freeze again."""

    frozen_before: int
    reason: str
    window: int


class ReferenceRefreshed(Event, kind="reference"):
    """The reference model was made or brought up to date with the training weights."""

    evaluation: int
    builder: str
    wall_s: float
    cpu_s: float
    controller_cpu_s: float = 0.0


class RungTaken(Event, kind="rung"):
    """The reference model's number format from here on; `before` is empty for the first choice."""

    before: str
    after: str
    reason: str


class ControllerChosen(Event, kind="controller"):
    """Where evaluations are made, 'process' or 'inline', or 'none' where none are, and why."""

    controller: str
    reason: str


class CacheDecided(Event, kind="cache"):
    """How the frozen forward pass is done from here on."""

    boundary: str  # name of the last frozen layer module
    generation: int
    mode: str  # 'stored' (activations are stored and served) or 'computed'
    reason: str


class CacheUsed(Event, kind="cache_used"):
    """The use of one generation of stored activations, from its beginning to its end."""

    boundary: str
    generation: int
    hits: int  # samples that came from the store
    misses: int  # samples that were computed
    repeats: int  # samples that were in the store when their batch came, served or not
    batches: int
    size_bytes: int
    checks: int  # batches whose stored activations were compared with computed ones
    largest_error: float  # of those checks, relative
    damaged: int  # stored samples that could not be read again; they count as misses


class Declined(Event, kind="declined"):
    """The library chose not to act, and why; training continues without that part."""

    what: str
    reason: str


class FaultCaught(Event, kind="fault"):
    """Something of ours failed; training continued."""

    where: str
    error: str
    count: int


Kind = TypeVar("Kind", bound=Event)


class EventsByKind:
    """Finds events by their kind."""

    __slots__ = ()
    events: tuple[Event, ...]

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]

    def first(self, kind: type[Kind]) -> Kind | None:
        """Return the first event of one kind, or None."""
        return next(iter(self.of(kind)), None)

    def last(self, kind: type[Kind]) -> Kind | None:
        """Return the latest event of one kind, or None."""
        return next(reversed(self.of(kind)), None)


def read_event(record: dict[str, Any]) -> Event:
    """Return the event that a line of a journal holds; fields of a later version are left out.

    Raises:
        LookupError, TypeError, ValueError: it holds none, or a value does not fit.
    """
    return msgspec.convert(record, EVENT_TYPES[record["event"]])
