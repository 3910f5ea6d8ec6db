"""What freezing could save in a training, measured on a copy of it."""

from egeria.advice.advice import Advice, DepthCost
from egeria.advice.measure import advise

__all__ = ["Advice", "DepthCost", "advise"]
