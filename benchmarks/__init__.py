"""Benchmarks, each run as `python -m benchmarks.<name>`; `--help` describes what it measures.

Start with `parallel`: training steps compared with other libraries (`peers`). `operators` measures single operators. `harness` is
the shared code: alternating rounds, medians and tables, and each side of a comparison in its own processes. May import every
folder, including tests.
"""
