"""Supervision of a job's processes: hangs, stragglers, telemetry, time accounting, profiler traces.

Start at torchrun.py, which forks one process per device (forked_ranks.py) and watches their heartbeats externally. Inside each
process watchdog.py monitors the training loop and ends a rank that makes no progress; stragglers.py detects the rank that slows
the others down. No rank detects another's hang: each ends itself, and torchrun.py then ends the others.
Imports `modeling`, `parallel` and `profiles`.
"""
