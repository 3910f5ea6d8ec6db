"""What a policy may need beside plasticity, the loss and the rate; only that is measured."""

from egeria.session.measures.foresight import Foresight
from egeria.session.measures.gradients import GradientSums
from egeria.session.measures.hooks import OptimizerHooks
from egeria.session.measures.measures import Measures
from egeria.session.measures.weights import WeightChanges

__all__ = ["Foresight", "GradientSums", "Measures", "OptimizerHooks", "WeightChanges"]
