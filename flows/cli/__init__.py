"""The `trainshed` command: start at `main.py`, which parses arguments.

A subcommand is a function that takes the options and returns the exit code: `run` in the module of the same name, or another one
that `main.py` names, in `runs/` (commands for existing runs) or `experiments.py` (ladder, mixture, branches). `deployments.py`
makes deployments from the shipped profiles and prefect.yaml, and chooses which of them `up` registers. The module of a subcommand
is imported when the command is called, so that `--help` loads neither torch nor Prefect. Nothing imports this package. Imports
`flows`, `flows.experiments`, `flows.server`, `flows.ui`, `modeling`, `profiles` and `tasks`.
"""
