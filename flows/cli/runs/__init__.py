"""Commands for existing runs: list, compare, continue under a new name (`fork.py`), show and remove.

Start with `runs.py`. May import `flows.cli.run`, `flows.ui` and below.
"""
