"""Commands for existing runs: list, compare, continue under a new name (`fork.py`), show and remove.

Start with `runs.py`, which has `fleet` and `gc` too; `series.py` has `promote`. Imports `flows.cli`, `flows.ui`, `modeling`,
`profiles` and `tasks`.
"""
