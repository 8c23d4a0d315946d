"""Operators of the parallel library against alternatives: attention, document masks, loss, AdamW.

Start with `kernels`, which compares training's kernels with those of libraries.
"""
