"""Adapters for training frameworks; the only place that may import one.

A plain loop needs none of them: `egeria.attach` is the whole interface.
"""
