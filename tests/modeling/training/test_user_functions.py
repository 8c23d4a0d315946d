"""User functions in a working folder whose modules have the names of Trainshed's packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from modeling.training.user_functions import load

HOME = Path(__file__).parents[3]
LOAD = """
import importlib, pathlib
from modeling.training.user_functions import load
from profiles.user_functions import PACKAGES
assert load("own:loss")(1, 2) == 3
files = [importlib.import_module(name).__file__ for name in PACKAGES]
print(all(pathlib.Path(file).is_relative_to(HOME) for file in files))
"""


def shadow_packages(folder: Path) -> None:
    """Put modules into a folder that must not be imported in place of Trainshed's packages."""
    (folder / "tasks.py").write_text("raise RuntimeError('imported from the working folder')")
    for package in ("profiles", "modeling"):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(
            "raise RuntimeError('imported from the working folder')"
        )


def test_working_folder_is_searched_with_a_safe_path_and_never_replaces_our_packages(tmp_path):
    shadow_packages(tmp_path)
    (tmp_path / "own.py").write_text("def loss(logits, targets): return logits + targets")
    code = f"HOME = {str(HOME)!r}\n{LOAD}"
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tasks:loss", "tasks is a module of Trainshed; rename the file"),
        ("no_such_module:loss", "No module named"),
        ("math:loss", "math has no loss"),
        ("math:pi", "is not a function"),
    ],
)
def test_invalid_functions_are_rejected(name, message):
    path = list(sys.path)
    try:
        with pytest.raises(ValueError, match=message):
            load(name)
    finally:
        sys.path[:] = path
