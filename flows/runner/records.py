"""What the run folder keeps of a flow run's steps: the artifacts that they use, and their failures."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State

from flows.runner.retries import reason
from modeling.training.metrics import record_event
from profiles.files import run_files, state_files
from tasks.step import Context
from tasks.store import runs
from tasks.store.artifacts import Artifact

log = logging.getLogger(__name__)


class UsedArtifacts:
    """References of a run folder to the artifacts that its run uses, which garbage collection keeps.

    Attributes:
        keeps_recorded: whether to add to the references of the folder instead of replacing those of the same kinds.
    """

    def __init__(self, keeps_recorded: bool) -> None:
        self.keeps_recorded = keeps_recorded
        self._keys: dict[str, list[str]] = {}  # by kind

    def add(self, artifact: Artifact) -> None:
        """Note that the flow uses an artifact; `write` records it."""
        if artifact.key and artifact.key not in self._keys.get(artifact.kind, ()):
            self._keys.setdefault(artifact.kind, []).append(artifact.key)

    def write(self, context: Context) -> None:
        """Record all of them in the context's run folder."""
        store = context.store
        run = store.run_folder(context.run_folder.name)
        with store.lock(f"artifacts-{run.name}"):  # an evaluation may record its artifacts at the same time
            known = self._recorded(run.read(run_files.ARTIFACTS), context.run_folder / run_files.ARTIFACTS)
            kept = known if self.keeps_recorded else {}
            used = self._keys.copy()  # steps in the background may add to it
            own = {kind: [*dict.fromkeys([*kept.get(kind, ()), *keys])] for kind, keys in used.items()}
            if known != known | own:
                run.write(run_files.ARTIFACTS, json.dumps(known | own, indent=1).encode())

    def _recorded(self, data: bytes | None, location: Path) -> dict[str, list[str]]:
        """What the run folder refers to.

        Empty if the file is corrupted and this flow uses all artifacts anyway.
        """
        if data is None:
            return {}
        types = dict.fromkeys(state_files.parse(data) or (), list)
        if self.keeps_recorded:
            return state_files.require_json(data, location, types)
        if (known := state_files.parse_json(data, location, types)) is None:
            log.warning("%s: written anew", location)
        return known or {}


class Failures:
    """Failed attempts of steps in the run folder's events.jsonl, with the last training step.

    Steps in the background record theirs while the flow opens the folder.

    Args:
        folder: of the run; None until `open`.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._earlier: list[dict[str, Any]] = []  # from before there was a run folder

    def record(self, step: str, how: str, state: State) -> None:
        """Record one; without a folder, when it is opened.

        An OSError is logged and not raised, because it would keep Prefect from retrying the step.
        """
        event: dict[str, Any] = {
            "event": f"{step} {how}",
            "time": round(time.time(), 3),
            "reason": reason(state),
        }
        with self._lock:
            if self._folder is None:
                self._earlier.append(event)
                return
        try:
            row = runs.last_training_row(self._folder) if step == "train" else None
            record_event(self._folder, **event, **({"step": row["step"]} if row else {}))
        except OSError as error:
            log.warning("not recorded in the run's events: %s; %s", event["event"], error)

    def open(self, folder: Path) -> None:
        """Record those from before there was this folder, and later ones in it."""
        with self._lock:
            self._folder = folder
            earlier, self._earlier = self._earlier, []
        for event in earlier:
            record_event(folder, **event)
