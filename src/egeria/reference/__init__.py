"""The reference model: a snapshot of the training model that its activations are compared with."""

from egeria.reference.machine import Machine
from egeria.reference.quantized import QuantizedReference, warm_up

__all__ = ["Machine", "QuantizedReference", "warm_up"]
