"""Evaluation of finished runs by held-out loss, and of any checkpoint also by language-model tasks.

Start with `held_out.py`, the evaluate step of the main flow. `checkpoints.py` evaluates single checkpoints of a run that may
still train, `harness.py` runs lm-evaluation-harness in a separate process, and `results.py` stores results by step. Imports
`modeling`, `profiles`, `tasks`, `tasks.launchers`, `tasks.reporting`, `tasks.steps` and `tasks.store`.
"""
