"""Operators of `parallel`, compared with alternatives: kernels, ring and linear attention, loss.

Start with `kernels`, which compares attention, loss and AdamW with those of libraries. `ring_attention` compares two devices,
or one rank's part, with one device. Both are also rows of `benchmarks.gpu` and `benchmarks.parallel`. May import `harness`.
"""
