"""Interleaved measurements of single costs."""
