"""Evaluation of runs and checkpoints: held-out loss and language-model tasks; averages of checkpoints.

Start with `held_out.py`, the evaluate step of the main flow. `checkpoints.py` evaluates single checkpoints of a run that may
still train, `average.py` averages checkpoints, and evaluates and exports the mean, `harness.py` runs lm-evaluation-harness in a
separate process, and `results.py` stores results by step. Imports `modeling`, `profiles`, `tasks`, `tasks.launchers`,
`tasks.reporting`, `tasks.steps` and `tasks.store`.
"""
