"""The model's layers: cutting them into modules, reading their activations, freezing and thawing
them.

Start with `modules` (how a model is cut), `taps` and `undisturbed` (how activations are read
without a trace) and `freezing` (what frozen means).
"""
