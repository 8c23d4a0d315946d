"""Measurements on one GPU that is lent for minutes.

    python -m benchmarks.gpu --minutes 9 --out FILE

`rows.py` has the rows, most valuable first; `lease.py` runs them within the time, and appends each result to
the file when it exists; `start.py` starts a measured module, also on torch 2.11; `tables.py` makes the tables of
docs/devices/gpus.md from the results; `prepare.py` collects what a machine without a network lacks, with the help of
`slim_nccl.py`.

May import `rows`, `training_steps` and `harness`.
"""
