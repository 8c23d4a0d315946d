"""Continual pretraining: a series' promoted model, its rounds' data and schedules.

Start with `series.py`, the promoted model and its successor's promotion. `data.py` has what a round trains on, `schedule.py` its
learning rate. Imports `modeling`, `profiles`, `tasks`, `tasks.steps` and `tasks.store`.
"""
