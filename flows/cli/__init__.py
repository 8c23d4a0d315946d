"""The `trainshed` command, one module a subcommand; start reading at `main.py`, which parses the arguments.

A subcommand is the function `run(options)` in the module of the same name: here, in `runs/` (commands for existing runs) or in
`experiments/` (ladder, mixture, branches). The module is imported when the command is called, so that `--help` loads neither
torch nor Prefect. May import everything in flows and below; nothing imports it.
"""
