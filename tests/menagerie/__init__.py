"""Some thirty tiny models, each an edge case that one sentence describes.

The laws of the design run over all of them. A model that is known not to work stays, with the
reason in `unsupported`.
"""

import pytest

from menagerie import convolutions, oddities, sequences
from menagerie.specimen import Specimen

MENAGERIE: tuple[Specimen, ...] = (*convolutions.SPECIMENS, *sequences.SPECIMENS, *oddities.SPECIMENS)
SPECIMENS = {specimen.name: specimen for specimen in MENAGERIE}
SUPPORTED = [specimen for specimen in MENAGERIE if not specimen.unsupported]
SUPPORTED_NAMES = [specimen.name for specimen in SUPPORTED]
STATELESS = [specimen for specimen in SUPPORTED if specimen.name != "CarryingState"]  # it has state in no checkpoint

each_supported = pytest.mark.parametrize("specimen", SUPPORTED, ids=SUPPORTED_NAMES)
each_stateless = pytest.mark.parametrize("specimen", STATELESS, ids=lambda specimen: specimen.name)

__all__ = [
    "MENAGERIE",
    "SPECIMENS",
    "STATELESS",
    "SUPPORTED",
    "SUPPORTED_NAMES",
    "Specimen",
    "each_stateless",
    "each_supported",
]
