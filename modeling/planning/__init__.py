"""Planning a run from its profile: memory, communication, step time and cost; device calibration.

Plans need no device; only `measure.py` does, which measures its speeds for `calibration.py`. Start with `planner.py`.
`stage_costs.py` runs layers on the meta device under the meter of `meter.py`, which counts operators' FLOPs and bytes by
`operator_costs.py`; `memory.py` computes a rank's bytes from them, and `step_time.py` seconds, with measured speeds or those
of `efficiency.py` and, for links, `links.py`. `search.py` compares topologies and changes them, `replan.py` searches one for
other hardware, and `auto.py` resolves keys that are `auto`. A device's memory and peaks are in `parallel/device.py`. Imports
`modeling`, `modeling.compilation`, `modeling.models`, `parallel` and `profiles`.
"""
