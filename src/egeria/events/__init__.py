"""Everything a run can say, one frozen record per kind of event.

The journal writes them, the report and the replay read them; nothing else passes between the
parts that decide and the parts that show. `step` is the number of optimizer steps done so far.
Times are seconds of wall clock (`wall_s`) and of CPU (`cpu_s`) in the training process; those of
the controller process say so.
"""

from __future__ import annotations

from egeria.events.cache import CacheDecided, CacheUsed
from egeria.events.compiling import FreezeWaits, Recompiled
from egeria.events.course import (
    ComputeProfiled,
    ControllerChosen,
    ControllerRestarted,
    Declined,
    FaultCaught,
    FidelityChecked,
    IntervalChanged,
    IntervalMeasured,
    MetricLogged,
    ModuleFrozen,
    ModulesOrdered,
    PlasticityRead,
    ReadingDropped,
    ReferenceRefreshed,
    Resumed,
    RunClosed,
    RungTaken,
    RunStarted,
    StageChanged,
    Thawed,
)
from egeria.events.event import SCHEMA_VERSION, Event
from egeria.events.ranks import Rewrapped

__all__ = [
    "EVENT_TYPES",
    "SCHEMA_VERSION",
    "CacheDecided",
    "CacheUsed",
    "ComputeProfiled",
    "ControllerChosen",
    "ControllerRestarted",
    "Declined",
    "Event",
    "FaultCaught",
    "FidelityChecked",
    "FreezeWaits",
    "IntervalChanged",
    "IntervalMeasured",
    "MetricLogged",
    "ModuleFrozen",
    "ModulesOrdered",
    "PlasticityRead",
    "ReadingDropped",
    "Recompiled",
    "ReferenceRefreshed",
    "Resumed",
    "Rewrapped",
    "RunClosed",
    "RunStarted",
    "RungTaken",
    "StageChanged",
    "Thawed",
]

EVENT_TYPES: dict[str, type[Event]] = {
    event.kind: event
    for event in (
        RunStarted,
        ControllerChosen,
        ControllerRestarted,
        ModulesOrdered,
        ComputeProfiled,
        IntervalMeasured,
        PlasticityRead,
        ReadingDropped,
        StageChanged,
        ModuleFrozen,
        FreezeWaits,
        Thawed,
        Rewrapped,
        Recompiled,
        ReferenceRefreshed,
        RungTaken,
        FidelityChecked,
        IntervalChanged,
        CacheDecided,
        CacheUsed,
        Declined,
        FaultCaught,
        MetricLogged,
        Resumed,
        RunClosed,
    )
}
