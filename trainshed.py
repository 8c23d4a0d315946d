"""The command `trainshed`, and what Prefect's workers load, beside any modules on PYTHONPATH.

Both import Trainshed's own packages. Python searches the folders in PYTHONPATH before installed packages, and names such as
`flows` and `tasks` are common: with a module tasks.py there, Trainshed would import that one. The name of this module is
Trainshed's alone, so deployments name it, too: their flows are `trainshed.pretrain` and so on, and their pull step is
`trainshed.record_folder`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

PACKAGES = ("flows", "tasks", "modeling", "parallel", "profiles")  # top-level ones of Trainshed
HOME = str(Path(__file__).resolve().parent)
FOLDER = "TRAINSHED_WORKING_FOLDER"
# The module of each flow that has deployments.
FLOWS = {
    "branches": "flows.experiments.branches",
    "chain": "flows.chain",
    "continual": "flows.continual",
    "evaluate": "flows.evaluate",
    "export": "flows.export",
    "finetune": "flows.pretrain",
    "fleet": "flows.fleet",
    "ladder": "flows.experiments.ladder",
    "mixture": "flows.experiments.mixture",
    "pretrain": "flows.pretrain",
    "share": "flows.experiments.share",
}


def put_own_packages_first() -> list[str]:
    """Search Trainshed's folder first if PYTHONPATH has other packages of these names.

    Child processes do so too.

    Returns:
        Their files. They are not imported; everything else in their folders still is.
    """
    given = os.environ.get("PYTHONPATH")
    folders = given.split(os.pathsep) if given else []  # an empty one is the working folder
    specs = [PathFinder.find_spec(name, folders) for name in PACKAGES]
    # A folder without __init__.py has no origin, and does not precede an installed package.
    found = [spec.origin for spec in specs if spec is not None and spec.origin is not None]
    others = [file for file in found if not Path(file).resolve().is_relative_to(HOME)]
    if others:
        sys.path.insert(0, HOME)
        os.environ["PYTHONPATH"] = os.pathsep.join([HOME, *folders])
    return others


def record_folder(directory: str) -> None:
    """Pull step of prefect.yaml: record the working folder in the environment of the flow run."""
    os.environ[FOLDER] = directory


def __getattr__(name: str) -> Any:
    """The flow of this name, which Prefect loads as `trainshed.NAME`."""
    if name not in FLOWS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    put_own_packages_first()
    from modeling.start import without_garbage_collection

    with without_garbage_collection():
        flow = globals()[name] = getattr(import_module(FLOWS[name]), name)
    return flow


def main() -> int:
    """Run the command; returns its exit code."""
    if others := put_own_packages_first():
        files = ", ".join(others)
        print(f"trainshed: imports its own packages instead of these on PYTHONPATH: {files}", file=sys.stderr)
    from flows.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
