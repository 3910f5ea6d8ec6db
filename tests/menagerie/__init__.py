"""Some twenty-five tiny models, each an edge case that one sentence describes.

`test_menagerie` runs the laws over all of them, where it is not in a hurry. A model that is known not to work stays,
with the reason in `unsupported`.
"""

import pytest

from menagerie import convolutions, oddities, sequences
from menagerie.specimen import Specimen

MENAGERIE: tuple[Specimen, ...] = (*convolutions.SPECIMENS, *sequences.SPECIMENS, *oddities.SPECIMENS)
SPECIMENS = {specimen.name: specimen for specimen in MENAGERIE}
SUPPORTED = [specimen for specimen in MENAGERIE if not specimen.unsupported]
FIRST = (
    "residual",
    "stochastic_depth",
    "Tied",
    "Checkpointed",
    "Translator",
    "Backwards",
    "Replacing",
    "spectral_norm",
)
"""What stands for all of them where a test is not of the laws."""
each_of_the_first = pytest.mark.parametrize("specimen", [SPECIMENS[name] for name in FIRST], ids=FIRST)

__all__ = ["MENAGERIE", "SPECIMENS", "SUPPORTED", "Specimen", "each_of_the_first"]
