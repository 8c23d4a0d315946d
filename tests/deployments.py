"""Registers some of the shipped deployments with a server, like `trainshed up`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any
from unittest import mock

from flows.cli.deployments import write_file

HOME = Path(__file__).parents[1]


def register(api: str, entries: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Register the automations and these of the deployments that `flows.cli.deployments.listed` returns.

    In this process, which has imported the flows, but in another thread: in this one, Playwright's event loop may run.
    """
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows import registration

    file = folder / "deployments.yaml"
    write_file(file, HOME, entries)
    server, folder_of_runs = temporary_settings({PREFECT_API_URL: api}), {"TRAINSHED_FOLDER": "/"}
    with server, mock.patch.dict(os.environ, folder_of_runs), ThreadPoolExecutor(1) as pool:
        command = pool.submit(copy_context().run, registration.main, ["--deployments", str(file)])
        assert command.result() == 0
