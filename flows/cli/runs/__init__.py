"""The commands for runs that exist: list (`runs.py`), compare, continue under a new name (`fork.py`), show and remove.

Start with `runs.py`.
"""
