"""Recovery: a run's checkpoints, requests to resume from one, and the check of replicated weights.

Start at checkpoints.py: `Checkpoints` decides what to resume from, when to save and what to keep. parallel.checkpoint writes and
reads the files. Imports `modeling.supervision`, `modeling.training`, `parallel` and `profiles`.
"""
