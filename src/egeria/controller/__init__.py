"""Who evaluates: takes activations of the training model, gives back plasticity readings."""

from egeria.controller.inline import InlineController
from egeria.controller.protocol import Controller, Request, Result

__all__ = ["Controller", "InlineController", "Request", "Result"]
