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
FIRST = {"residual", "stochastic_depth", "Tied", "Checkpointed", "Translator", "Backwards", "CalledTwice", "Replacing"}
"""What `scripts/test` takes; the others are for `scripts/test-all`."""


def of_menagerie(specimens, *, always=()):
    """Return specimens, or their names, as parameters of a test: slow ones, but for the first and those named."""
    found = {getattr(entry, "name", entry): entry for entry in specimens}
    return [
        pytest.param(entry, id=name, marks=[] if name in {*FIRST, *always} else pytest.mark.slow)
        for name, entry in found.items()
    ]


each_supported = pytest.mark.parametrize("specimen", of_menagerie(SUPPORTED))

__all__ = [
    "MENAGERIE",
    "SPECIMENS",
    "SUPPORTED",
    "SUPPORTED_NAMES",
    "Specimen",
    "each_supported",
    "of_menagerie",
]
