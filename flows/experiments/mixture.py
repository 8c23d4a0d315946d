"""Mixture: train small runs with sampled source weights; propose weights from their losses by source.

    plan ─> proxy ┐
            proxy ├─> proposed weights ─> proxy with these weights, if asked for
            proxy ┘

Each proxy is an ordinary run of the pretraining flow, so finished ones are cached. Proxies that were trained before a source was
added are evaluated on the held-out text of all sources, and have weight 0 for the new source in the fit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from prefect import flow

from flows.experiments.plans import load_mixture, require_startable
from flows.experiments.side_by_side import file_name, run_side_by_side
from flows.final_states import final_states
from flows.hooks import EXPERIMENT_HOOKS
from flows.run_setup import flow_context
from flows.runner import THREADS, Runner, log_result
from modeling.planning.auto import resolve_auto
from modeling.scaling.proxies import Proxy, proposed, training_sources
from profiles.errors import ProfileError
from profiles.sections.base import required
from tasks import keys
from tasks.evaluation.held_out import OtherDataEvaluationStep
from tasks.experiments import json_artifacts, mixtures
from tasks.experiments.mixtures import Measured
from tasks.reporting import html, mixture_page
from tasks.reporting.history import OF_SOURCE
from tasks.steps.dataset import DatasetStep
from tasks.store import activities, runs
from tasks.store.artifacts import Artifact
from tasks.store.backends.folder import FolderBackend
from tasks.store.store import Store, open_store

log = logging.getLogger(__name__)


@flow(name="mixture", flow_run_name=file_name, task_runner=THREADS, **EXPERIMENT_HOOKS)
@final_states
def mixture(file: str, store: str = "./store", check: bool = False) -> dict[str, Any]:
    """Train a mixture's proxies and propose weights for its target; returns the proposal and file paths.

    Args:
        file: The mixture file.
        store: Where artifacts and runs are kept: a folder or an s3:// prefix.
        check: Also train a proxy with the proposed weights, and compare it with its forecast.
    """
    described, target, proxies, _ = load_mixture(file)
    require_startable([proxy.run for proxy in proxies])
    opened = open_store(store, target.profile.cluster.work_dir or "store")
    results = run_side_by_side(described, [proxy.run for proxy in proxies], store)
    sources = training_sources(target.profile)
    natural = next(proxy for proxy in proxies if len(proxy.sources) == len(sources))  # the first of its group
    inputs = {proxy.name: runs.read_inputs(runs.fetch(opened, proxy.name)) for proxy in proxies}
    _require_one_tokenizer(inputs)
    dataset = opened.artifacts.expect(DatasetStep.id(required(inputs[natural.name]["dataset"])))
    tokens = mixtures.source_tokens(opened, dataset.key, target.profile)
    losses = _losses(opened, proxies, results, dataset, len(sources))
    measured = [
        Measured(proxy.name, proxy.weights or mixtures.shares_of(tokens, proxy.sources), found)
        for proxy, found in zip(proxies, losses, strict=True)
    ]
    against = natural.weights or mixtures.shares_of(tokens, sources)
    artifact = mixtures.write_proposal(opened, described, target, measured, against, tokens)
    document = json_artifacts.read(opened, artifact)
    mean = document["losses"][-1]
    gain = f"{mean['change']:+.4f} against the natural mixture"
    # The command prints this at its end, which is soon unless another proxy is trained first.
    (log.info if check else log_result)(f"proposed: mean loss {mean['loss']:.4f}, {gain}")
    result = {"mixture": described.name, "key": artifact.key, **document}
    if check:
        name = f"{described.name}-{len(sources)}-{artifact.key[:8]}"
        run = proposed(described, target, document["weights"], name)
        (trained,) = run_side_by_side(described, [run.run], store)
        result["outcome"] = mixtures.outcome(document, _by_source(trained["evaluation"]))
    folder = opened.work_dir / "mixtures"
    profile = mixtures.profile_of(described, target, document["weights"])
    FolderBackend(folder).write(f"{described.name}.yaml", profile.encode())
    page = html.write(folder / f"{described.name}.html", mixture_page.render(described, result))
    return {**result, "profile": str(folder / f"{described.name}.yaml"), "page": str(page)}


def _require_one_tokenizer(inputs: Mapping[str, Mapping[str, str | None]]) -> None:
    """Raise ProfileError if the proxies' tokenizers differ: losses per token would not be comparable."""
    first = next(iter(inputs))
    for name, found in inputs.items():
        if found["tokenizer"] != inputs[first]["tokenizer"]:
            reason = f"differs between {first} and {name}, so their losses per token cannot be compared; name a fixed tokenizer"
            raise ProfileError("tokenizer.source", None, reason)


def _losses(
    store: Store,
    proxies: Sequence[Proxy],
    results: Sequence[Mapping[str, Any]],
    dataset: Artifact,
    sources: int,
) -> list[dict[str, float]]:
    """Held-out losses by source of each proxy; those with fewer sources are evaluated on all sources."""
    return [
        _by_source(
            result["evaluation"] if len(proxy.sources) == sources else _evaluate(store, proxy, dataset)
        )
        for proxy, result in zip(proxies, results, strict=True)
    ]


def _evaluate(store: Store, proxy: Proxy, dataset: Artifact) -> Mapping[str, Any]:
    """Evaluation of a trained proxy on the held-out text of a dataset, recorded as an artifact of its run."""
    with activities.begin(store, "evaluate", proxy.name) as lock:
        folder = runs.fetch(store, proxy.name)
        identity = keys.digest([runs.read_inputs(folder)["identity"], dataset.key])
        context = flow_context(resolve_auto(proxy.run.profile), store, folder)
        with Runner(context, lock, keeps_recorded=True) as runner:
            return required(runner.run(OtherDataEvaluationStep(dataset, identity))).summary


def _by_source(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Held-out loss by source name."""
    metrics = evaluation["metrics"]
    return {
        name.removeprefix(OF_SOURCE): value for name, value in metrics.items() if name.startswith(OF_SOURCE)
    }
