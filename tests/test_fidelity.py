"""When the reference's own error makes it take a more exact number format."""

from __future__ import annotations

import pytest
import torch

from egeria.controller import EvaluationPlan, Request, Ticket
from egeria.controller.inline import InlineController
from egeria.events import FidelityChecked

TRAINING, REFERENCE = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
PLASTICITY = 1 - 0.5**0.5
"""Of these two activations, by hand in `test_plasticity`."""


class WrongBy:
    """A reference that is wrong by a given error, and by another one where it is calibrated again."""

    def __init__(self, error, after_calibration=None):
        self.own_error, self.after_calibration, self.number_format = error, after_calibration, "int8-static"

    def activation(self, tap, batch):
        return REFERENCE

    def error(self, tap, metric):
        assert float(metric(TRAINING, REFERENCE)) == pytest.approx(PLASTICITY)
        return self.own_error

    def recalibrate(self):
        self.own_error = self.after_calibration or self.own_error
        return self.after_calibration is not None

    def escalate(self, reason):
        assert "own error" in reason and "above 10%" in reason
        self.number_format = "bf16"
        return True

    def take_changes(self):
        return []


@pytest.mark.parametrize(
    ("errors", "outcome"),
    [((0.09,), "kept"), ((0.11,), "escalated"), ((0.2, 0.09), "recalibrated"), ((0.2, 0.11), "escalated")],
)
def test_an_error_is_judged_by_the_plasticity_that_it_has_to_show(errors, outcome):
    settings = {"largest_map": 16, "window": 4, "precision": "auto", "device": "cpu", "fidelity_share": 0.1}
    reference = WrongBy(*(error * PLASTICITY for error in errors))
    controller = InlineController(EvaluationPlan(taps=("a",), **settings), reference)
    for evaluation in range(1, 4):
        ticket = Ticket(evaluation=evaluation, step=evaluation, module=0, tap="a")
        controller.submit(Request(ticket=ticket, batch=None, activation=TRAINING))
    (checked,) = [report for report in controller.poll().reports if isinstance(report, FidelityChecked)]
    told = errors[-1] if outcome == "recalibrated" else errors[0]
    assert checked.outcome == outcome and checked.error == pytest.approx(told * PLASTICITY)
    assert reference.number_format == ("bf16" if outcome == "escalated" else "int8-static")
