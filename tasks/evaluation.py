"""Evaluation: held-out loss and perplexity of a finished run, measured by `modeling.training.evaluate` on the run's cluster.

What it measures lies in the run's folder until it is published, so that whoever comes after an orchestrator that died asks for
the same job, and joins it or takes what it left.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

from profiles.schema import Profile
from tasks import failures
from tasks.launchers import Job, JobFailed, create, execute
from tasks.store.artifacts import Artifact
from tasks.store.store import Store
from tasks.training import Words, cluster_job

log = logging.getLogger(__name__)

KIND = "evaluation"
FILE = "evaluation.json"
TIMEOUT = 6 * 3600.0  # seconds


def run(
    profile: Profile, store: Store, folder: Path, key: str, dataset: Artifact, graphs: Artifact | None = None
) -> Artifact:
    """Evaluate the run's newest checkpoint on the whole validation split.

    The artifact's summary: step, validation_loss (nats a token), perplexity, tokens, metrics (the user's, by name), and
    samples of what the model writes, as token ids.

    Raises:
        JobFailed: the attempt failed; another one begins again.
        Hopeless: it failed for a reason that another one would meet again, or what it measured is not finite.
        TimeoutError: it took longer than `TIMEOUT`.
    """
    job = cluster_job("evaluate", profile, store, folder, key, dataset, graphs)
    output = (
        job.folder / f"evaluation-{key[:16]}.json"
    )  # of this key: a run is also evaluated on others' data
    job = job.with_arguments("--output", str(output))
    with store.artifacts.lock(KIND, key):
        found = store.artifacts.find(KIND, key)
        if found:
            return found
        summary: dict[str, Any] = {}
        with store.artifacts.publish(KIND, key, summary) as staging:
            if not output.exists():  # else it ended while nobody watched
                _execute(profile, job, output)
            result = json.loads(output.read_text())
            _require_finite(folder.name, result, output)
            summary.update(
                {
                    name: result[name]
                    for name in ("validation_loss", "perplexity", "tokens", "step", "metrics", "samples")
                }
            )
            shutil.copyfile(output, staging / FILE)
        output.unlink()
    return store.artifacts.expect(KIND, key)


def _require_finite(run: str, result: dict[str, Any], output: Path) -> None:
    """Refuse a loss or a metric that is no number to compare or keep; it is measured anew by whoever asks again."""
    for name, value in {"held-out loss": result["validation_loss"], **result["metrics"]}.items():
        if not math.isfinite(value):
            output.unlink()
            reason = f"the {name} of run {run} at step {result['step']} is {value}"
            raise failures.Hopeless(
                f"{reason}: it diverged, or a function of yours did; look at its last losses"
            )


def _execute(profile: Profile, job: Job, output: Path) -> None:
    words = Words(job.log_file)
    launcher = create(profile.cluster.launcher, profile.cluster)
    try:
        execute(launcher, job, words.forward, timeout=TIMEOUT, grace=0)  # there is nothing to save
    except JobFailed as failure:
        log.warning("%s\n%s", failure, failure.detail)
        raise failures.classified(profile, failure) from failure
    if not output.exists():
        raise JobFailed(f"{job.name} ended without a result; its log: {job.log_file}")
