"""Freezing what would hardly change any more: how a module moves, the rate still to come, and a guard on the loss."""

from egeria.policy.forecast.policy import Forecast

__all__ = ["Forecast"]
