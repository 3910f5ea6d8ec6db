"""Some thirty tiny models, each an edge case that one sentence describes.

The laws of the design run over all of them. A model that is known not to work stays, with the
reason in `unsupported`.
"""

from menagerie import convolutions, oddities, sequences
from menagerie.specimen import Specimen

MENAGERIE: tuple[Specimen, ...] = (*convolutions.SPECIMENS, *sequences.SPECIMENS, *oddities.SPECIMENS)

__all__ = ["MENAGERIE", "Specimen"]
