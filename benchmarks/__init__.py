"""Benchmarks, each run as `python -m benchmarks.<name>`; `--help` describes what it measures.

Start with `parallel`: training steps compared with other libraries (`peers`). `timing` has the alternating rounds, medians and
tables that all share; `processes` runs one side of a comparison in its own processes. May import every folder, also tests.
"""
