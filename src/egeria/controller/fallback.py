"""A controller process where one can be had, else the evaluation in the training process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from egeria.controller.inline import InlineController
from egeria.controller.process import ProcessController
from egeria.controller.protocol import Controller, Refreshed, Report, Request, SteppedBack
from egeria.errors import ControllerError
from egeria.layers.batch import Batch


class FallbackController:
    """Uses the process until it proves impossible (`ControllerError`), then the other for good.

    Args:
        process: the controller to begin with.
        make_inline: makes the one to fall back to.
    """

    def __init__(self, process: ProcessController, make_inline: Callable[[], InlineController]) -> None:
        self._process = process
        self._make_inline = make_inline
        self._inline: InlineController | None = None
        self._reports: list[Report] = []
        self._newest: tuple[int, weakref.ref[nn.Module], Batch | None] | None = None

    @property
    def process(self) -> ProcessController:
        """The controller begun with."""
        return self._process

    @property
    def is_waiting(self) -> bool:
        """Tell whether something is under way."""
        return bool(self._reports) or self._current.is_waiting

    @property
    def is_apart(self) -> bool:
        """Tell whether there is a process to look after."""
        return self._current.is_apart

    @property
    def cpu_s(self) -> float:
        """CPU seconds spent outside the training process so far."""
        return self._process.cpu_s

    def warm_up(self) -> None:
        """Start the process."""
        self._try(self._current.warm_up)

    def refresh(self, evaluation: int, model: nn.Module, batch: Batch | None) -> bool:
        """Bring the reference model up to date."""
        self._newest = (evaluation, weakref.ref(model), batch)  # one put together of parts is not to be kept
        if self._inline is not None:
            return self._inline.refresh(evaluation, model, batch)
        try:
            return self._process.refresh(evaluation, model, batch)
        except ControllerError as error:
            self._fall_back(error)
            return True

    def submit(self, request: Request) -> None:
        """Ask for one evaluation."""
        self._try(lambda: self._current.submit(request))

    def poll(self) -> list[Report]:
        """Return what has happened since the last call."""
        self._try(lambda: self._reports.extend(self._current.poll()))
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> list[Report]:
        """Let go of everything."""
        return [*self._reports, *self._current.close()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the one in use."""
        return self._current.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> bool:
        """Go on from a saved state."""
        return self._current.load_state_dict(state, model)

    @property
    def _current(self) -> Controller:
        return self._inline or self._process

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except ControllerError as error:
            self._fall_back(error)

    def _fall_back(self, error: ControllerError) -> None:
        reason = f"{error}. Evaluations are made in the training process instead"
        self._reports += self._process.close("its controller process is given up")
        self._inline = self._make_inline()
        self._reports.append(SteppedBack(what="the controller process", reason=reason, final=False))
        if self._newest is None:
            return
        evaluation, reference, batch = self._newest
        model = reference()
        if model is not None:
            self._inline.refresh(evaluation, model, batch)
        else:
            self._reports.append(Refreshed(evaluation=evaluation, builder="", error="the weights are gathered anew"))
