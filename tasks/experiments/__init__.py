"""Experiments in the store: forecasts, proposed mixtures and replay shares, runs of a branches file.

Start with `forecasts.py`. `json_artifacts.py` stores forecasts and proposals. The runs themselves are ordinary ones, which
`flows/experiments` starts. Imports `modeling`, `profiles`, `tasks`, `tasks.evaluation`, `tasks.steps` and `tasks.store`.
"""
