"""Evaluation: held-out loss and perplexity of a finished run, measured by `modeling.evaluate` on the run's cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from profiles.schema import Profile
from tasks.artifacts import Artifact, Store
from tasks.launchers import create, execute
from tasks.training import Words, cluster_job

KIND = "evaluation"
FILE = "evaluation.json"
TIMEOUT = 6 * 3600.0  # seconds


def run(
    profile: Profile, store: Store, folder: Path, key: str, dataset: Artifact, graphs: Artifact | None = None
) -> Artifact:
    """Evaluate the run's newest checkpoint on the whole validation split.

    The artifact's summary: step, validation_loss (nats a token), perplexity, tokens, and samples of what the model writes, as
    token ids.
    """
    job = cluster_job("evaluate", profile, store, folder, key, dataset, graphs)
    with store.lock(KIND, key):
        found = store.find(KIND, key)
        if found:
            return found
        summary: dict[str, Any] = {}
        with store.publish(KIND, key, summary) as staging:
            output = staging / FILE
            job, words = job.extended("--output", str(output)), Words(job.log_file)
            execute(create(profile.cluster.launcher, profile.cluster), job, words.forward, timeout=TIMEOUT)
            result = json.loads(output.read_text())
            summary.update(
                {
                    name: result[name]
                    for name in ("validation_loss", "perplexity", "tokens", "step", "samples")
                }
            )
    return store.expect(KIND, key)
