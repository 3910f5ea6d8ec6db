"""Rows of activations on the disk: files, checksums, the index, and the directory
that holds them.
"""
