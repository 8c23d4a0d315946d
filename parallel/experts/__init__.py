"""Mixture of experts: router, dispatch to the experts' ranks, grouped products, load balancing.

Start with `layer.py` (the module that models use), then `router.py` and the two ways to compute experts: `dropless.py`, which
exchanges rows (`exchange.py`, `pending.py`) and multiplies them in groups (`grouped.py`) or one expert after the other
(`sequential.py`), and `slots.py` (a capacity per expert). `balance.py` has losses and statistics, `lora.py` low-rank updates.
Imports `parallel` and `parallel.layers`.
"""
