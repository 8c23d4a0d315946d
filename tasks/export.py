"""Export: the run's newest checkpoint as a Hugging Face folder, `<run>/export/`, with the tokenizer's files beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from modeling.conversion.convert import Options, convert
from modeling.conversion.journal import RECORD
from profiles.schema import Profile
from tasks.store import runs
from tasks.store.backends import Objects
from tasks.store.manifest import NAME as MANIFEST
from tasks.store.store import Artifact, Store
from tasks.store.sync import Mirror

KIND = "export"
PART = "export"


def mirror(store: Store, folder: Path) -> None:
    """Copy the export to the store, where that is remote; of the folder it alone, since the run may go on elsewhere."""
    if isinstance(store.storage, Objects):
        Mirror(folder / PART, store.storage, f"runs/{folder.name}/{PART}").copy()


def run(profile: Profile, store: Store, folder: Path, key: str, tokenizer: Artifact) -> Artifact:
    """Write the weights in the type of training, config.json and the tokenizer's files; the folder appears whole.

    The artifact's summary: part (of the run's folder) and bytes.
    """
    with store.lock(KIND, key):
        found = runs.find(store, KIND, key, folder)
        if found:
            return found
        partial, final = folder / f"{PART}.partial", folder / PART
        checkpoint = f"checkpoints/step_{runs.checkpoints(store, folder)[-1]}"
        here = store.fetch_run_part(folder.name, checkpoint)
        convert(here, partial, Options("hf"), replace=True)
        if runs.lies_remote(store, checkpoint):
            shutil.rmtree(here.parent)  # copies
        for file in store.path(tokenizer).iterdir():
            if file.name != MANIFEST:
                shutil.copy2(file, partial)
        (partial / RECORD).unlink()
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        size = sum(path.stat().st_size for path in final.iterdir())
        return runs.publish(store, KIND, key, folder, PART, {"bytes": size})
