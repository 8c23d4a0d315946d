"""AdamW with ZeRO-1 sharding of its states.

Start with `zero1.py` (the optimizer step), then `buckets.py` (flat memory behind parameters and gradients) and `adamw.py` (the
update). Imports `parallel`'s mesh, layout, collectives and device.
"""
