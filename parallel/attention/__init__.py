"""Attention: kernels behind one interface, tiling, ring attention, dropout; linear attention.

Start with `attention.attention`, which dispatches to the others; `kernels` holds the formulas, `ring` attention over the context
axis, and `maxima` the largest scores, for QK-clip. Linear attention is `delta_rule`, over the context axis `delta_context`, after
`short_convolution`. Imports `parallel`.
"""
