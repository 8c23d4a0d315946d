"""Tracing a run's graphs under fake tensors: what ahead-of-time compilation compiles, and exact costs of the graphs.

Start with `trace.py`. `graph_stats.py` has a graph's costs and digest, `traced_plan.py` puts them into a plan,
`compile.py` compiles one program, `operators.py` lists what a device must support. Imports `modeling.training`,
`modeling.planning` and below.
"""
