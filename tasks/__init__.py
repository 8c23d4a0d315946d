"""Steps of a run and what they work with: store, sources, tokenization, launchers, reports, trackers.

Start with `step.py` (the protocol of a step), then `steps/` (one file per step) and `keys.py` (their cache keys). `inputs.py`
pins what a profile refers to; `fork.py`, `lineage.py`, `chain_gate.py`, `continual/` and `experiments/` relate one run to
another. Imports `modeling`, `parallel` and `profiles`.
"""
