"""Reference step: log-probabilities of a DPO run's pairs under the model that it starts from.

Keyed by these weights and the data, so runs with other hyperparameters reuse them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modeling.data.records import REFERENCE
from profiles.files import run_files, state_files
from tasks import keys
from tasks.step import Context, Step
from tasks.steps.jobs import cluster_job, run_job
from tasks.store.artifacts import Artifact


@dataclass
class ReferenceStep(Step):
    """Log-probabilities of both splits' answers under the initial weights. Artifact summary: source."""

    dataset: Artifact
    weights: Artifact
    graphs: Artifact | None = None  # the compiled graphs; None compiles on first use

    kind = "reference"
    name = "reference"

    def key(self, context: Context) -> str:
        return keys.reference(context.profile, self.weights.key, self.dataset.key)

    def make(self, context: Context, key: str) -> Artifact:
        """Compute the log-probabilities. Raises as `EvaluationStep.make`."""
        profile, store, folder = context.profile, context.store, context.run_folder
        output = folder / run_files.LOGS / f"reference-{key[:16]}.npz"
        inputs = ("reference", context, key, self.dataset, self.graphs)
        job = cluster_job(*inputs, weights=self.weights, output=output)
        with store.artifacts.publish(self.id(key), {"source": profile.init.from_}) as staging:
            if not state_files.exists(output):  # else the job ended while no flow followed it
                run_job(profile, job, output)
            shutil.copyfile(output, staging / REFERENCE)
        output.unlink()
        return store.artifacts.expect(self.id(key))

    def describe(self, summary: Mapping[str, Any]) -> str:
        return f"reference log-probabilities from {summary['source']}"
