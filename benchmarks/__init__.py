"""Benchmarks, each run as `python -m benchmarks.<name>`; `--help` describes what it measures.

Start with `parallel`: training steps compared with other libraries (`peers`). `harness` has what they share: alternating rounds,
medians and tables, one side of a comparison in its own processes. `operators` measures single operators. May import every folder,
also tests.
"""
