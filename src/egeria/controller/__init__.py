"""Who evaluates: takes activations of the training model, gives back plasticity readings."""

from egeria.controller.absent import AbsentController
from egeria.controller.assessor import Assessor, Plan
from egeria.controller.choice import Choice, choose, controller_maker, spare_cores
from egeria.controller.fallback import FallbackController
from egeria.controller.inline import InlineController
from egeria.controller.process import ProcessController
from egeria.controller.protocol import Controller, ControllerStatus, EvaluationFailed, Report, Request, Ticket
from egeria.controller.trust import Limits

__all__ = [
    "AbsentController",
    "Assessor",
    "Choice",
    "Controller",
    "ControllerStatus",
    "EvaluationFailed",
    "FallbackController",
    "InlineController",
    "Limits",
    "Plan",
    "ProcessController",
    "Report",
    "Request",
    "Ticket",
    "choose",
    "controller_maker",
    "spare_cores",
]
