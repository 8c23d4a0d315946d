"""Prefect events of a run, and automations on them: notifications, and evaluation of checkpoints.

Start with `events.py`, which emits the events from the flow process as the files of the run folder change. `automations.py` has
the automations that `flows.registration` installs: notifications, and the one that evaluates each completed checkpoint
(`trainshed up --evaluate`). Imports `flows.server`, `profiles` and `tasks`.
"""
