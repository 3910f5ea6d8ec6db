"""Who evaluates: takes activations of the training model, gives back plasticity readings."""

from egeria.controller.inline import AbsentController, EvaluationPlan, InlineController
from egeria.controller.process import ControllerChoice, ProcessController, choose, spare_cores
from egeria.controller.protocol import (
    Controller,
    ControllerStatus,
    EvaluationFailed,
    EvaluationResult,
    Report,
    Request,
    Ticket,
)

__all__ = [
    "AbsentController",
    "Controller",
    "ControllerChoice",
    "ControllerStatus",
    "EvaluationFailed",
    "EvaluationPlan",
    "EvaluationResult",
    "InlineController",
    "ProcessController",
    "Report",
    "Request",
    "Ticket",
    "choose",
    "spare_cores",
]
