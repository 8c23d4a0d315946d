"""Working folder of flow runs started by a Prefect worker: the base of relative paths in parameters.

A folder that a pull step selects comes first on the run's sys.path and in its PYTHONPATH, so a user's own `tasks.py`
there would shadow ours. The pull step therefore only records the folder. Prefect imports the flow in an empty folder,
and the flow and its hooks change to the recorded one.
"""

from __future__ import annotations

import os

from trainshed import FOLDER, record_folder

record = record_folder  # the pull step of deployments that earlier versions registered


def enter() -> None:
    """Change to the recorded folder; does nothing in a run that no worker started."""
    if FOLDER in os.environ:
        os.chdir(os.environ[FOLDER])
