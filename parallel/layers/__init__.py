"""Layers whose weights are sharded over tensor ranks, and the products that they compute with.

Start with `linear.py` (column- and row-parallel layers, embeddings), then `gqa.py` (Q, K and V in one product), `norms.py` and
`lora.py`. `products.py` computes the matrix products, in 8 bits where a profile asks for it. Imports `parallel.layout`,
`parallel.collectives` and what is below them.
"""
