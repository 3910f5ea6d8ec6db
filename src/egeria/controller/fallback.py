"""A controller process where one can be had, else the evaluation in the training process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from egeria.controller.inline import InlineController
from egeria.controller.process import ProcessController
from egeria.controller.protocol import Controller, ControllerStatus, Report, Request
from egeria.errors import ControllerError
from egeria.events import Declined, FaultCaught
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

    def refresh(
        self, evaluation: int, model: nn.Module, batch: Batch | None, state: Mapping[str, Any] | None = None
    ) -> bool:
        """Bring the reference model up to date."""
        if state is not None:
            return self._current.refresh(evaluation, model, batch, state)
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
        self._current.submit(request)

    def poll(self) -> ControllerStatus:
        """Return what happened since the last call."""
        try:
            status = self._current.poll()
        except ControllerError as error:
            self._fall_back(error)
            status = self._current.poll()
        reports, self._reports = [*self._reports, *status.reports], []
        return replace(status, reports=reports, cpu_s=self._process.cpu_s)

    def close(self) -> ControllerStatus:
        """Release everything."""
        status = self._current.close()
        return replace(status, reports=[*self._reports, *status.reports], cpu_s=self._process.cpu_s)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the one in use."""
        return self._current.state_dict()

    @property
    def _current(self) -> Controller:
        return self._inline or self._process

    def _fall_back(self, error: ControllerError) -> None:
        reason = f"{error}. Evaluations are made in the training process instead"
        self._reports += self._process.close("its controller process is given up").reports
        self._inline = self._make_inline()
        self._reports.append(Declined(step=0, what="the controller process", reason=reason))
        if self._newest is None:
            return
        evaluation, reference, batch = self._newest
        model = reference()
        if model is not None:
            self._inline.refresh(evaluation, model, batch)
        else:
            error_text = "the weights are gathered anew"
            self._reports.append(FaultCaught(step=0, where="refreshing the reference", error=error_text, count=1))
