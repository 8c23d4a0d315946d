"""Whether a run is complete and unchanged, found without importing torch.

A flow would only find each step cached.

Covers pretraining from scratch on local data with a local store. All other runs are left to their flow.
"""

from __future__ import annotations

from typing import Any

from profiles.errors import ProfileError
from profiles.files import run_files, state_files
from profiles.recompute import AUTO
from profiles.schema import Profile
from tasks import keys
from tasks.inputs import EXPORT, Lockfile, resolve
from tasks.reporting.outcome import Outcome, final_evaluation, run_result
from tasks.sources.shard import SOURCE_ERRORS
from tasks.step import Context
from tasks.steps.dataset import DatasetStep
from tasks.steps.tokenizer import TokenizerStep
from tasks.store import run_artifacts
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.store import Store

LOCAL = ("python-docs", "files")  # kinds of sources without a network, if their path is local
NOT_STORED = ("plan", "resolve", "report")  # steps that make no artifact


def find(store: Store, profile: Profile) -> dict[str, Any] | None:
    """The result of a completed run, as its flow returns it; None if a flow has to find out, or has work."""
    run = store.run_folder(profile.name)
    if store.is_remote or not _is_simple(profile) or run.stored_identity is None:
        return None
    try:
        context = Context(profile, store, run.path)
        lockfile = Lockfile.from_bytes(run.read(run_files.LOCKFILE) or b"", run_files.LOCKFILE)
        inputs = resolve(profile, store, lockfile=lockfile)
        if inputs.lockfile.pins.keys() != lockfile.pins.keys():
            return None
        evaluated = _find_all(Context(profile, store, run.path, resolved=inputs), run.stored_identity)
    except (ProfileError, OSError, ValueError, *SOURCE_ERRORS):  # the flow reports it
        return None
    report = state_files.read_json(context.run_folder / "report.json") or {}
    page = context.run_folder / "report.html"
    if evaluated is None or not state_files.exists(page) or not final_evaluation(report, profile.train.steps):
        return None
    try:
        outcomes = [Outcome(**step) for step in report["steps"] if step["step"] not in NOT_STORED]
        hows = ("skipped" if outcome.how == "skipped" else "cached" for outcome in outcomes)
        steps = [vars(each) | {"how": how, "retries": 0} for each, how in zip(outcomes, hows, strict=True)]
        parameters = report["plan"]["parameters"]
    except (LookupError, TypeError):  # corrupted; the flow writes another one
        return None
    result = run_result(run.path, EXPORT, str(page), evaluated.summary, None)
    return {**result, "parameters": parameters, "steps": steps}


def _is_simple(profile: Profile) -> bool:
    """Whether the run's identity needs no network, no other run and no plan."""
    return (
        profile.init.from_ is None
        and profile.tokenizer.source == "train"
        and not profile.fine_tunes
        and profile.train.steps is not None
        and AUTO not in (profile.train.recompute, profile.parallel.keep_gathered)
        and (profile.checkpoint.resume, profile.checkpoint.weights_only) == ("newest", False)
        and not profile.tracking.trackers
        and all(source.kind in LOCAL and "://" not in (source.path or "") for source in profile.data.sources)
    )


def _find_all(context: Context, identity: str) -> Artifact | None:
    """The final evaluation, if every artifact of the run is complete and of this identity."""
    profile, store, name = context.profile, context.store, context.run_folder.name
    tokenizer = TokenizerStep()
    trained = tokenizer.find(context, tokenizer.key(context))
    if trained is None:
        return None
    dataset = DatasetStep(trained)
    corpus = dataset.find(context, dataset.key(context))
    if corpus is None or keys.run_identity(profile, trained.key, corpus.key) != identity:
        return None
    evaluation = keys.evaluation(name, identity, profile.train, profile.evaluate)
    evaluated = store.artifacts.find(ArtifactId("evaluation", evaluation))
    pointers = (
        ArtifactId("training", keys.training(name, identity, profile.train)),
        ArtifactId(EXPORT, keys.export(name, identity, profile.train)),
    )
    complete = all(run_artifacts.find(store, id, name) for id in pointers)
    return evaluated if complete else None
