"""Registers some of the shipped deployments with a server, like `trainshed up`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.cli.deployments import write_file

HOME = Path(__file__).parents[1]


def register(api: str, entries: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Register the automations and these of the deployments that `flows.cli.deployments.listed` returns."""
    file = folder / "deployments.yaml"
    write_file(file, HOME, entries)
    environment = {**os.environ, "PREFECT_API_URL": api, "TRAINSHED_FOLDER": "/"}
    command = [sys.executable, "-m", "flows.registration", "--deployments", str(file)]
    subprocess.run(command, cwd=HOME, env=environment, check=True, capture_output=True)
