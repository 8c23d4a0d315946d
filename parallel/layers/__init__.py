"""Tensor-parallel layers, and the matrix products that they run.

Start with `linear.py` (column- and row-parallel layers, embeddings), then `gqa.py` (Q, K and V in one product), `norms.py` and
`lora.py`. `products.py` computes the matrix products, in FP8 if a profile asks for it. Imports `parallel`.
"""
