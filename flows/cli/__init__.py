"""The `trainshed` command, one module a subcommand; start reading at `main.py`, which parses the arguments.

A subcommand is `run(options)` of the module of its name, here, in `runs/` (commands for runs that exist) or in `experiments/`
(ladder, mixture, branches). It is imported when it is called, so that `--help` loads neither torch nor Prefect. May import
everything in flows and below; nothing imports it.
"""
