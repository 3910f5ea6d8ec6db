"""Who evaluates: takes activations of the training model, gives back readings of plasticity."""

from egeria.controller.inline import Answer, Controller, EvaluationPlan, InlineController, Ticket
from egeria.controller.process import ProcessController, choose, spare_cores

__all__ = [
    "Answer",
    "Controller",
    "EvaluationPlan",
    "InlineController",
    "ProcessController",
    "Ticket",
    "choose",
    "spare_cores",
]
