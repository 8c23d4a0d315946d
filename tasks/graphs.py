"""Graphs: compiles the training graphs ahead of time with `modeling.compile`, on this machine, before the cluster is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from profiles.schema import Profile
from tasks.artifacts import Artifact, Store
from tasks.launchers import Job, create, execute

KIND = "graphs"
TIMEOUT = 6 * 3600.0  # seconds


def run(profile: Profile, store: Store, folder: Path, key: str) -> Artifact:
    """Compile the graphs of the profile in the run's folder, once for all runs that share them.

    The artifact's summary: total, successful, failed and from_cache; note, where there is something to know.
    """
    with store.lock(KIND, key):
        found = store.find(KIND, key)
        if found:
            return found
        summary: dict[str, Any] = {}
        with store.publish(KIND, key, summary) as staging:
            arguments = ("--run-folder", str(folder), "--output", str(staging))
            execute(
                create("local"),
                Job("compile", "modeling.compile", arguments, folder / "logs"),
                timeout=TIMEOUT,
            )
            written = json.loads((staging / "summary.json").read_text())
            shown = ("total", "successful", "failed", "from_cache", "note")
            summary.update({name: written[name] for name in shown if written.get(name) is not None})
    return store.expect(KIND, key)
