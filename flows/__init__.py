"""Prefect flows and the `trainshed` command.

`pretrain.py`, `continual.py`, `export.py`, `evaluate.py`, `fleet.py` and `chain.py` hold one flow each; start reading at
`pretrain.py`. `experiments/` has the flows of several runs. `steps.py` says which step needs which, and `runner.py` runs steps as
Prefect tasks. `cli/` is the command, `ui/` the output in the terminal and in Prefect's UI, `alerts/` Prefect's events and
automations, `server/` Prefect's server and its settings. May import tasks, modeling, parallel and profiles.
"""
