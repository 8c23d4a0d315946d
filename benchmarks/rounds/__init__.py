"""Rounds of continual pretraining on two invented languages: `python -m benchmarks.rounds`.

Start with `__main__`; `learning` has what rounds learn and forget, `flows` the series that are killed and refused. `languages`
makes the texts, and `series` trains rounds in this process. The modules run one way: `__main__` → `learning`, `flows` → `series`
→ `languages`. Imports `benchmarks.harness`, `flows`, `modeling`, `profiles`, `tasks` and `tests`.
"""
