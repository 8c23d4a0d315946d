"""Benchmarks, each run as `python -m benchmarks.<name>`; `--help` describes what it measures.

The modules of this folder, those of `data` and `operators`, and `rounds` are the programs. Start with `parallel`, which compares
training steps with those of other libraries, and `gpu`, which does so on GPUs. Both run rows of `rows`, which run the programs
of `training_steps` and `operators`; `harness` is shared code. Imports inside run one way: programs → `rows` → `operators`,
`training_steps` → `harness`, and no program of this folder imports another. May import every other folder, including tests.
"""
