"""Attention: kernels behind one interface, tiling, ring attention over the context axis, dropout.

Start with `attention.attention`, which dispatches to the others; `kernels` holds the formulas. Imports `parallel`.
"""
