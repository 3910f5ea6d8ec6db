"""A predictor that tells from a layer module's weights whether to freeze it: what the policy
'smartfrz' asks.

`WeightHistory` gathers snapshots of the weights in an interval, `FreezePredictor` looks at them.
The weights of the predictor lie beside it, with [their card](CARD.md); `python -m benchmarks
smartfrz` trains it again.

Source: SmartFRZ (arXiv 2401.16720), as far as its text tells.
"""

from egeria.smartfrz.history import WeightHistory
from egeria.smartfrz.predictor import (
    NUM_SNAPSHOTS,
    NUM_WEIGHTS,
    FreezePredictor,
    load_predictor,
    save_predictor,
)

__all__ = [
    "NUM_SNAPSHOTS",
    "NUM_WEIGHTS",
    "FreezePredictor",
    "WeightHistory",
    "load_predictor",
    "save_predictor",
]
