"""Comparing networks afterwards."""
