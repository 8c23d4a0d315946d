"""The steps of a run, one file and one artifact each.

Start with the protocol that all steps follow (`tasks/step.py`), then `tokenizer.py`, the smallest step. `flows/pretrain.py`
states which step needs which. `programs.py` and `compile_array.py` belong to the graphs step. The evaluation step is in
`tasks/evaluation/`, the report step in `tasks/report.py`. `jobs.py` runs job modules on the profile's cluster, for several
steps. Imports `modeling`, `parallel`, `profiles`, `tasks`, `tasks.launchers`, `tasks.reporting`, `tasks.sources`, `tasks.store`
and `tasks.tokenization`.
"""
