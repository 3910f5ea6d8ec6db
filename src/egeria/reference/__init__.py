"""The reference model: a snapshot of the training model that its activations are compared with."""

from egeria.reference.ladder import LadderReference
from egeria.reference.machine import Machine
from egeria.reference.protocol import Reference
from egeria.reference.snapshot import SnapshotReference
from egeria.reference.warm import warm_up

__all__ = ["LadderReference", "Machine", "Reference", "SnapshotReference", "warm_up"]
