"""The reference model: a snapshot of the training model that its activations are compared with."""

from egeria.reference.protocol import Reference
from egeria.reference.snapshot import SnapshotReference

__all__ = ["Reference", "SnapshotReference"]
