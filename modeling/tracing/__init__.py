"""Tracing a run's graphs under fake tensors, for ahead-of-time compilation and exact costs.

Start with `trace.py`. `graph_stats.py` computes a graph's costs, `traced_plan.py` puts them into a plan,
`rehearsal.py` calls what runs outside the model, `compile.py` compiles one program, and `operators.py` lists the operators that a
device must support. Imports `modeling`, `modeling.compilation`, `modeling.models`, `modeling.planning`, `modeling.training`,
`parallel` and `profiles`.
"""
