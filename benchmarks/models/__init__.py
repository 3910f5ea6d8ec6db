"""Networks from the literature, for benchmarks and tests; the residual net for small images is `examples/resnet.py`."""
