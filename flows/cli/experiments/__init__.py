"""The commands `trainshed ladder`, `mixture` and `branches`; `table.py` prints the plan of their runs.

Start with `ladder.py`; the others have the same structure. `share.py` is `trainshed mixture share`. Imports `flows.cli`,
`flows.experiments`, `flows.ui`, `modeling`, `profiles` and `tasks`.
"""
