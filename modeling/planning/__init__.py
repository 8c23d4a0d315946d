"""Planning a run from its profile alone, without a device: memory, communication, step time and cost.

Start with `planner.py`. `stage_costs.py` runs layers on the meta device under the `meter.py`, whose FLOPs and bytes
per operator are `operator_costs.py`; `memory.py` turns them into bytes of a rank, `step_time.py` into seconds, and
`search.py` compares topologies. Imports `modeling.models`, `parallel` and `profiles`.
"""
