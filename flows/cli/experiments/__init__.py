"""The commands `trainshed ladder`, `mixture` and `branches`; `table.py` prints the plan of their runs."""
