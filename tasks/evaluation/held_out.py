"""Evaluation step: held-out loss and perplexity of a finished run.

Runs `modeling.training.evaluate` on the run's cluster. The result is a file in the run folder until it is published, so a flow
that is restarted after a crash re-attaches to the job or uses the result that it left.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profiles.files import run_files
from profiles.schema import Evaluate
from tasks import failures, keys
from tasks.reporting.format import format_perplexity, format_value
from tasks.step import Context, Step
from tasks.steps.jobs import JobOptions, cluster_job, run_json_job
from tasks.store.artifacts import Artifact

FILE = "evaluation.json"
SUMMARY = ("validation_loss", "perplexity", "tokens", "step", "metrics", "samples")


class NotFinite(failures.FatalError):
    """A loss or metric is infinite or not a number."""


@dataclass
class EvaluationStep(Step):
    """Evaluates the run's latest checkpoint on the whole validation split.

    The artifact's summary: step, validation_loss (nats per token), perplexity (None for pairs), tokens, metrics (by name), and
    samples of generated text, as token ids.
    """

    dataset: Artifact  # whose validation split is used
    identity: str  # of the run, and of the held-out data if it is another run's
    graphs: Artifact | None = None  # the compiled graphs; None compiles on first use
    weights: Artifact | None = None  # base weights of LoRA, or weights of the reference model
    reference: Artifact | None = None  # log-probabilities of the reference model

    kind = "evaluation"
    name = job_name = "evaluate"

    def key(self, context: Context) -> str:
        run, profile = context.run_folder.name, context.profile
        return keys.evaluation(run, self.identity, profile.train, profile.evaluate)

    def make(self, context: Context, key: str) -> Artifact:
        """Evaluate.

        Raises:
            JobFailed: the attempt failed; another one starts over.
            FatalError: another attempt would fail for the same reason, or a result is not finite.
            TimeoutError: it took longer than `TIMEOUT`.
        """
        profile, folder = context.profile, context.run_folder
        # One file per key: a run may also be evaluated on another run's data.
        output = folder / run_files.LOGS / f"evaluation-{key[:16]}.json"
        options: JobOptions = {"output": output}
        options |= self.job_options(context, key)
        options["reference"] = self.reference
        options["weights"] = self.weights if profile.uses_initial_weights else None
        job = cluster_job("evaluate", context, key, self.dataset, self.graphs, **options)
        job = replace(job, name=self.job_name)
        summary: dict[str, Any] = {}
        with context.store.artifacts.publish(self.id(key), summary) as staging:
            result = run_json_job(profile, job, output)
            _require_finite(folder.name, result, output)
            summary.update({name: result[name] for name in SUMMARY})
            if result.get("sets"):
                summary["sets"] = result["sets"]
            shutil.copyfile(output, staging / FILE)
            self.extend_artifact(context, staging, summary)
        output.unlink()
        return context.store.artifacts.expect(self.id(key))

    def job_options(self, context: Context, key: str) -> JobOptions:
        """Further options of the job; for subclasses."""
        return {}

    def extend_artifact(self, context: Context, staging: Path, summary: dict[str, Any]) -> None:
        """Add files and summary entries to the artifact; for subclasses."""

    def describe(self, summary: Mapping[str, Any]) -> str:
        values = [f"validation loss {summary['validation_loss']:.4f}"]
        if summary["perplexity"] is not None:
            values.append(f"perplexity {format_perplexity(summary['perplexity'])}")
        values += [f"{name} {format_value(value)}" for name, value in summary.get("metrics", {}).items()]
        return ", ".join(values)


@dataclass
class OtherDataEvaluationStep(EvaluationStep):
    """Evaluates a run's latest checkpoint on another run's validation split.

    A separate kind, because a cached run refers to its own final evaluation only, and the others would be garbage.
    """

    kind = "checkpoint-evaluation"


@dataclass
class SetsEvaluationStep(EvaluationStep):
    """Evaluates a run's latest checkpoint on each held-out set of a series separately, in one job.

    `identity` includes the dataset's key. The artifact's summary has `sets` in addition: loss and tokens of each set by name.
    """

    profile_file: Path | None = None  # the profile of the evaluation; None: the run's

    def key(self, context: Context) -> str:
        run, profile = context.run_folder.name, context.profile
        identity = keys.digest([self.identity, "sets"])
        return keys.evaluation(run, identity, profile.train, Evaluate(metrics=profile.evaluate.metrics))

    def job_options(self, context: Context, key: str) -> JobOptions:
        return {"sets": True, "profile": self.profile_file}

    def describe(self, summary: Mapping[str, Any]) -> str:
        shown = [f"{name} {each['loss']:.4f}" for name, each in summary["sets"].items()]
        whose = "the promoted model's loss" if self.profile_file else "loss"
        return f"{whose} on held-out sets: {', '.join(shown)}"


def _require_finite(run: str, result: dict[str, Any], output: Path) -> None:
    """Reject a non-finite loss or metric; removes the file, so that the next attempt evaluates again."""
    for name, value in {"held-out loss": result["validation_loss"], **result["metrics"]}.items():
        if not math.isfinite(value):
            output.unlink()
            raise NotFinite(
                f"the {name} of run {run} at step {result['step']} is {value}: the run diverged, or a metric function "
                "returned it; check the run's last losses"
            )
