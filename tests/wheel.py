"""Trainshed's wheel, installed in an environment of its own as pip would."""

import configparser
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import torch

from trainshed import PACKAGES

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"


def install(folder: Path) -> Path:
    """Install the wheel into a new environment with this one's dependencies; returns `trainshed`."""
    source = folder / "source"  # a copy, since building writes beside the packages
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "trainshed.py"):
        shutil.copy(ROOT / name, source)
    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True, text=True
    )
    wheel = source / built.stdout.splitlines()[-1]
    venv.create(folder / "environment", symlinks=True)
    (site,) = (folder / "environment/lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "dependencies.pth").write_text(str(Path(torch.__file__).parents[1]))
    entries = configparser.ConfigParser()
    entries.read(next(site.glob("trainshed-*.dist-info")) / "entry_points.txt")
    module, function = entries["console_scripts"]["trainshed"].split(":")
    script = folder / "environment/bin/trainshed"
    script.write_text(
        f"#!{script.with_name('python')}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
    )
    script.chmod(0o755)
    shutil.rmtree(source)
    return script
