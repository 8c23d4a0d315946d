"""Export: the run's newest checkpoint as a Hugging Face folder, `<run>/export/`, with the tokenizer's files beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from profiles.schema import Profile
from tasks import runs
from tasks.artifacts import Artifact, Store
from tasks.launchers import Job, create, execute
from tasks.manifest import NAME as MANIFEST

KIND = "export"
PART = "export"
TIMEOUT = 2 * 3600.0  # seconds


def run(profile: Profile, store: Store, folder: Path, key: str, tokenizer: Artifact) -> Artifact:
    """Write model.safetensors, config.json and the tokenizer's files; the folder appears whole.

    The artifact's summary: part (of the run's folder) and bytes.
    """
    with store.lock(KIND, key):
        found = runs.find(store, KIND, key, folder)
        if found:
            return found
        partial, final = folder / f"{PART}.partial", folder / PART
        shutil.rmtree(partial, ignore_errors=True)
        checkpoint = f"checkpoints/step_{runs.checkpoints(store, folder)[-1]}"
        here = store.fetch_run_part(folder.name, checkpoint)
        arguments = ("--run-folder", str(folder), "--output", str(partial))
        execute(
            create("local"), Job("export", "modeling.export", arguments, folder / "logs"), timeout=TIMEOUT
        )
        if runs.lies_remote(store, checkpoint):
            shutil.rmtree(here)  # a copy
        for file in store.path(tokenizer).iterdir():
            if file.name != MANIFEST:
                shutil.copy2(file, partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        size = sum(path.stat().st_size for path in final.iterdir())
        return runs.publish(store, KIND, key, folder, PART, {"bytes": size})
