"""Rivals of the default policy, each in a file of its own: what others freeze by, and controls."""
