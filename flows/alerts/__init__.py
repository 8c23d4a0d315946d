"""Alerts: Prefect events of a run, and the automations that send a notification for each.

Start with `events.py`, which names the kinds and learns of them from the run folder, in the flow's process; `automations.py` is
what `flows.registration` installs. Imports tasks and flows.server.
"""
