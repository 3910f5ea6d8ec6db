"""Skipping the frozen forward pass: stored boundary tensors, by sample (paper §4.3).

The store, its plan and the prefetcher live here. This version has none yet: `cache.enabled` is
answered with one warning and an event, and training goes on without.
"""
