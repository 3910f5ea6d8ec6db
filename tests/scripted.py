"""A controller that reads from a script instead of a reference model, and loops that have one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from egeria.controller.inline import Answer, Controller, Ticket
from egeria.events import Event, ReferenceRefreshed
from egeria.model.passes import Batch
from loops import FAST, Loop
from menagerie import SPECIMENS


@dataclass(eq=False)
class ScriptedController(Controller):
    """Gives the readings that it is given."""

    readings: Callable[[int, int], float] = lambda evaluation, module: 1.0
    """Called with the number of the evaluation and the layer module; returns the plasticity, or
    raises what a failing evaluation would."""
    refreshing: Callable[[nn.Module], None] = lambda model: None
    """Called at each refresh with the model; may raise."""
    requests: list[Ticket] = field(default_factory=list, init=False)
    closed: bool = field(default=False, init=False)
    _reports: list[Answer | Event] = field(default_factory=list, init=False)

    def refresh(self, model: nn.Module, batch: Batch | None, state: Mapping[str, Any] | None = None) -> bool:
        """Do what the script does at a refresh; nothing for a run that is resumed."""
        if state is None:
            self.refreshing(model)
            self._reports.append(ReferenceRefreshed(step=0, evaluation=0, builder="script", wall_s=0, cpu_s=0))
        return True

    def submit(self, ticket: Ticket, batch: Batch, training_BB: Tensor) -> None:
        """Note the request and read the script."""
        self.requests.append(ticket)
        self._reports.append(Answer(ticket, self.readings(ticket.evaluation, ticket.module)))

    def poll(self) -> list[Answer | Event]:
        """Return what was read since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> list[Answer | Event]:
        """Note that the run let go."""
        self.closed = True
        return self.poll()


def scripted_loop(directory: Path, name: str = "PartsByName", **attach: Any) -> Loop:
    """Return a loop whose readings freeze a layer module at every few evaluations."""
    given = {"controller": ScriptedController(), "config": FAST, "directory": directory, **attach}
    return Loop(SPECIMENS[name], given)


def frozen_loop(directory: Path, num_steps: int = 40, **attach: Any) -> Loop:
    """Return such a loop that has frozen something; in 40 steps all that may be."""
    loop = scripted_loop(directory, **attach)
    loop.step(num_steps)
    assert loop.run is not None and loop.run.frozen > 0
    return loop
