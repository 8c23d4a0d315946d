"""The commands `trainshed ladder`, `mixture` and `branches`; `table.py` prints the plan of their runs.

Start with `ladder.py`; the others have the same structure. May import `flows.experiments`, `flows.ui`, `flows.cli.run`
and below.
"""
