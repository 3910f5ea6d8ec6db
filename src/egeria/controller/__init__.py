"""Who evaluates: takes activations of the training model, gives back plasticity readings."""

from egeria.controller.inline import EvaluationPlan
from egeria.controller.process import ControllerChoice, choose, spare_cores
from egeria.controller.protocol import (
    AbsentController,
    Controller,
    ControllerStatus,
    EvaluationFailed,
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
    "Report",
    "Request",
    "Ticket",
    "choose",
    "spare_cores",
]
