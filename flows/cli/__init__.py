"""The `trainshed` command: one module per subcommand; start at `main.py`, which parses arguments.

A subcommand is the function `run(options)`, which returns the exit code, in the module of the same name: here, in `runs/`
(commands for existing runs) or in `experiments/` (ladder, mixture, branches). `deployments.py` makes deployments from the shipped
profiles and prefect.yaml, and chooses which of them `up` registers. The module of a subcommand is imported when the command is
called, so that `--help` loads neither torch nor Prefect. Nothing imports this package. Imports `flows`, `flows.server`,
`flows.ui`, `modeling`, `profiles` and `tasks`.
"""
