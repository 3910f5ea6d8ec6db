"""Skipping the frozen front of a model: what crosses from it to the rest,
recorded and given back.
"""
