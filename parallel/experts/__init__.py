"""Mixture of experts: router, dispatch to the experts' ranks, grouped products, load balancing.

Start with `layer.py` (the module that models use), then `router.py`, `grouped.py` (dropless) and `slots.py` (a capacity per
expert), `balance.py` (losses and statistics), `lora.py` (low-rank updates). Imports `parallel`'s mesh, layout and collectives.
"""
