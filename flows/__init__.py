"""Prefect flows and the `trainshed` command.

`pretrain.py`, `continual.py` and `export.py` hold one flow each; start reading at `pretrain.py`. `steps.py` says which
step needs which, and `runner.py` runs steps as Prefect tasks. `cli/` is the command, `ui/` the output in the terminal and
in Prefect's UI, `server/` Prefect's server and its settings. May import tasks, modeling, parallel and profiles.
"""
