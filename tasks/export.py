"""Export: the run's newest checkpoint as a Hugging Face folder, `<run>/export/`, with the tokenizer's files beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from modeling.conversion.convert import Options, convert
from modeling.conversion.journal import RECORD
from profiles.schema import Profile
from tasks.store import run_artifacts
from tasks.store.artifacts import Artifact
from tasks.store.manifest import NAME as MANIFEST
from tasks.store.store import Store

KIND = "export"
PART = "export"


def run(profile: Profile, store: Store, folder: Path, key: str, tokenizer: Artifact) -> Artifact:
    """Write the weights in the type of training, config.json and the tokenizer's files; the folder appears whole.

    The artifact's summary: part (of the run's folder) and bytes.
    """
    with store.artifacts.lock(KIND, key):
        found = run_artifacts.find(store, KIND, key, folder.name)
        if found:
            return found
        partial, final = folder / f"{PART}.partial", folder / PART
        run_folder = store.run_folder(folder.name)
        checkpoint = f"checkpoints/step_{run_folder.checkpoint_steps()[-1]}"
        here = run_folder.download(checkpoint)
        convert(here, partial, Options("hf"), replace=True)
        if run_folder.is_remote(checkpoint):
            shutil.rmtree(here.parent)  # copies
        for file in store.artifacts.path(tokenizer).iterdir():
            if file.name != MANIFEST:
                shutil.copy2(file, partial)
        (partial / RECORD).unlink()
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        size = sum(path.stat().st_size for path in final.iterdir())
        return run_artifacts.publish(store, KIND, key, folder.name, PART, {"bytes": size})
