"""Runs that were published for trn1, over the shipped profiles of their models; for plans only."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def published(name: str) -> str:
    """The path of a published run's profile, such as llama3-8b-trn1."""
    return str(FOLDER / f"{name}.yaml")
