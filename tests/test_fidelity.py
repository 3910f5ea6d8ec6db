"""When the reference's own error makes it take a more exact number format."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from egeria import Config
from egeria.controller import EvaluationPlan, Request, Ticket
from egeria.controller.inline import InlineController
from egeria.events import FidelityChecked
from egeria.plasticity import l2_distance
from egeria.policy import harmless_error, with_metric_of_policy


class WrongBy:
    """A reference that is wrong by a given error, until it takes the next format."""

    number_format = "int8-static"

    def __init__(self, error):
        self.own_error = error

    def activation(self, tap, batch):
        return torch.ones(4, 4)

    def recalibrate(self):
        return False

    def error(self, tap, metric):
        return self.own_error

    def escalate(self, reason):
        self.number_format = "bf16"
        return True

    def take_changes(self):
        return []


def outcomes(error, plasticity, **plan):
    """Give readings of this plasticity; return what was made of the error."""
    settings = {"largest_map": 16, "window": 4, "precision": "auto", "device": "cpu", "fidelity_share": 0.1}
    controller = InlineController(EvaluationPlan(taps=("a",), metric=l2_distance, **settings, **plan), WrongBy(error))
    training = torch.ones(4, 4) * (1 + plasticity**0.5)
    for evaluation in range(1, 4):
        ticket = Ticket(evaluation=evaluation, step=evaluation, module=0, tap="a")
        controller.submit(Request(ticket=ticket, batch=None, activation=training))
    return [report.outcome for report in controller.poll().reports if isinstance(report, FidelityChecked)]


@pytest.mark.parametrize(
    ("error", "plasticity", "harmless", "outcome"),
    [
        (9e-5, 1e-3, 0.0, "kept"),
        (2e-4, 1e-3, 0.0, "escalated"),
        (2e-4, 1e-3, 5e-4, "kept"),  # it could not turn a decision
        (6e-4, 1e-3, 5e-4, "escalated"),
        (6e-4, 1e-2, 5e-4, "kept"),
    ],
)
def test_an_error_matters_where_it_could_turn_a_decision(error, plasticity, harmless, outcome):
    assert outcomes(error, plasticity, harmless_error=harmless) == [outcome]


@pytest.mark.parametrize(
    ("policy", "harmless"), [("forecast", 2.5e-4), ("worth", 2.5e-4), ("egeria", 0.0), (nn.Identity, 0.0)]
)
def test_only_forecast_knows_an_error_that_turns_no_decision(policy, harmless):
    """The paper's rule goes by slopes, for which each digit matters."""
    config = with_metric_of_policy(Config.from_dict({"policy": {"name": policy, "limit": 0.02}}))
    assert harmless_error(config) == pytest.approx(harmless)
