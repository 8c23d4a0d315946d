"""Planning a run from its profile alone, without a device: memory, communication, step time and cost.

Start with `planner.py`. `stage_costs.py` runs layers on the meta device under the meter of `meter.py`, which counts operators'
FLOPs and bytes by `operator_costs.py`; `memory.py` computes a rank's bytes from them, `step_time.py` seconds, and `search.py`
compares topologies. Imports `modeling.compilation`, `modeling.models`, `parallel` and `profiles`.
"""
