"""Alerts: Prefect events of a run, and the automations that send a notification for each.

Start with `events.py`, which emits the events from the flow process as the files of the run folder change; `automations.py` has
the automations that `flows.registration` installs. Imports `flows.server`, `modeling`, `profiles` and `tasks`.
"""
