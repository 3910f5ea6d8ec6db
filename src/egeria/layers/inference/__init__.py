"""Running the frozen front as inference: normalisation folded into convolutions, weights cast once."""
