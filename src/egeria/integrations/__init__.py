"""Adapters for training frameworks; the only place that may import one."""
