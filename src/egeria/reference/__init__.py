"""The reference model: a snapshot of the training model that its activations are compared with."""

from egeria.reference.formats import Machine
from egeria.reference.quantized import QuantizedReference, warm_up
from egeria.reference.snapshot import Reference, SnapshotReference

__all__ = ["Machine", "QuantizedReference", "Reference", "SnapshotReference", "warm_up"]
