"""Single operators of the parallel library, compared with alternatives: attention, document masks, loss, AdamW.

Start with `kernels`, which compares training's kernels with those of libraries.
"""
