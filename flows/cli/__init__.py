"""The `trainshed` command, one module a subcommand; start reading at `main.py`, which parses the arguments.

`main.py` imports a subcommand's module only when it is called, so that `--help` loads neither torch nor Prefect. May
import everything in flows and below; nothing imports it.
"""
