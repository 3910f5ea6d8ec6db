"""The seam between the training loop and the evaluation of plasticity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from egeria.layers.batch import Batch

LONGEST_TEXT = 500


def brief(error: Exception) -> str:
    """Return an error in a few words, for a message or the journal."""
    return f"{type(error).__name__}: {error}"[:LONGEST_TEXT]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """Which evaluation it is: what pairs the outputs of the two models."""

    evaluation: int
    step: int
    module: int
    tap: str
    """The submodule whose output is the module's activation."""

    def failed(self, error: Exception, cpu_s: float = 0.0) -> Result:
        """Return the result of an evaluation that raised."""
        return Result(
            evaluation=self.evaluation, step=self.step, module=self.module, value=None, error=brief(error), cpu_s=cpu_s
        )

    def lost(self, reason: str) -> Result:
        """Return the result of an evaluation that never took place, though nothing is wrong."""
        return Result(evaluation=self.evaluation, step=self.step, module=self.module, value=None, lost=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One evaluation to make."""

    ticket: Ticket
    batch: Batch
    activation: Tensor
    """The training model's activation for the batch, or for the first rows of it [B, ...]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One evaluation made, or given up."""

    evaluation: int
    step: int
    module: int
    value: float | None
    """Plasticity; None where there is none."""
    error: str = ""
    """Why the evaluation failed."""
    lost: str = ""
    """Why there was no evaluation, though nothing is wrong: a full queue, a restart."""
    cpu_s: float = 0.0
    """CPU seconds it took outside the training process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """The reference model took over new weights, or failed to."""

    evaluation: int
    """The evaluation after which these weights were taken."""
    builder: str
    error: str = ""
    wall_s: float = 0.0
    """Seconds it took outside the training process."""
    cpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RungTaken:
    """The reference model changed its number format; `before` is empty for the first choice."""

    before: str
    after: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityRead:
    """What the number format costs in fidelity, against the plasticity it is there to show."""

    tap: str
    rung: str
    error: float
    """The metric between the full-precision snapshot and its quantized form."""
    plasticity: float
    """Mean of the recent readings."""
    outcome: str
    """'kept', 'recalibrated', 'escalated' or 'exhausted'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarted:
    """The controller process was replaced by a new one."""

    count: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SteppedBack:
    """The controller does without its process from here on, or evaluates no more."""

    what: str
    reason: str
    final: bool
    """Whether no evaluation will be made any more."""


Report = Result | Refreshed | RungTaken | FidelityRead | Restarted | SteppedBack


class Controller(Protocol):
    """Evaluates plasticity. No call blocks for longer than the evaluation it makes itself."""

    @property
    def is_waiting(self) -> bool:
        """Tell whether something is under way that `poll` will report."""
        ...

    @property
    def is_apart(self) -> bool:
        """Tell whether it lives beside the training, and is to be polled at every step to see that it does."""
        ...

    @property
    def cpu_s(self) -> float:
        """CPU seconds spent outside the training process so far."""
        ...

    def warm_up(self) -> None:
        """Get ready for the first refresh, if that takes time."""
        ...

    def refresh(self, evaluation: int, model: nn.Module, batch: Batch | None) -> bool:
        """Bring the reference model up to date with the training weights; calibrate it on the batch if need be.

        Returns:
            Whether the weights were taken: evaluations from here on are against them. If not, ask again.
        """
        ...

    def submit(self, request: Request) -> None:
        """Ask for one evaluation."""
        ...

    def poll(self) -> list[Report]:
        """Return what has happened since the last call, in order."""
        ...

    def close(self) -> list[Report]:
        """Let go of everything held, for good; return what was not polled yet, and what is lost now."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to read the same values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> bool:
        """Go on from a saved state; return whether the reference can do so without a refresh."""
        ...
