"""Working folder of flow runs started by a Prefect worker: the base of relative paths in parameters.

A folder that a pull step selects comes first on the run's sys.path and in its PYTHONPATH, so a user's own `tasks.py`
there would shadow ours. This pull step therefore only records the folder. Prefect imports the flow in an empty folder,
and the flow and its hooks change to the recorded one.
"""

from __future__ import annotations

import os

VARIABLE = "TRAINSHED_WORKING_FOLDER"


def record(directory: str) -> None:
    """Pull step of prefect.yaml: record the folder in the environment of the flow run."""
    os.environ[VARIABLE] = directory


def enter() -> None:
    """Change to the recorded folder; does nothing in a run that no worker started."""
    if VARIABLE in os.environ:
        os.chdir(os.environ[VARIABLE])
