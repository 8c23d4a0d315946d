"""What watches the processes of a job: hangs, stragglers, devices and hosts, profiler traces.

Start at torchrun.py: it starts one process per device and watches their heartbeats from outside. Inside each process watchdog.py
follows the training loop and ends a rank that makes no progress; stragglers.py names the rank that slows the others down.
Imports parallel and profiles; used by modeling.training and by the launchers.
"""
