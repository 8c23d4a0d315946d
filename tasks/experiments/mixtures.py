"""Proposed mixtures in the store: weights from the proxies' losses by source, and their expected gain.

A proposal is an immutable artifact whose key covers the target's settings, the proxies' weights and losses, the objective and the
bounds. `profile_of` applies one to its target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from modeling.scaling import mixture as laws_of
from modeling.scaling.planned_run import PlannedRun
from modeling.scaling.proxies import DIGITS, least_weight, overrides_of, training_sources
from profiles import resolve
from profiles.errors import ProfileError
from profiles.experiments import Mixture
from profiles.rules import data_sources
from profiles.schema import Profile
from tasks import keys
from tasks.experiments import json_artifacts
from tasks.steps.dataset import DatasetStep, read_file
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.store import Store

KIND = "mixture"
SHARE = 0.9  # probability of the intervals


@dataclass(frozen=True)
class Measured:
    """A finished proxy: training source weights (sum 1) and held-out losses by source in nats per token."""

    name: str
    weights: Mapping[str, float]
    losses: Mapping[str, float]


def source_tokens(store: Store, dataset: str, profile: Profile) -> dict[str, int]:
    """Training tokens by training source, in order, from the key of the dataset of the profile's sources.

    Raises ProfileError for a source without training tokens.
    """
    corpus = read_file(store, store.artifacts.expect(DatasetStep.id(dataset)))
    counts, first = {}, 0
    # A cached dataset has the names of the folders when it was made.
    for name, source in zip(data_sources.names(profile.data), corpus["sources"], strict=True):
        shards = corpus["train"][first : first + source["shards"]]
        counts[name] = sum(shard["tokens"] for shard in shards)
        first += source["shards"]
    for name in training_sources(profile):
        if not counts[name]:
            raise ProfileError("data.sources", name, "has no training tokens, so it has no weight")
    return {name: counts[name] for name in training_sources(profile)}


def shares_of(tokens: Mapping[str, int], sources: Sequence[str]) -> dict[str, float]:
    """The natural weights of some sources: their shares of the tokens."""
    total = sum(tokens[name] for name in sources)
    return {name: tokens[name] / total for name in sources}


def write_proposal(
    store: Store,
    mixture: Mixture,
    target: PlannedRun,
    measured: Sequence[Measured],
    natural: Mapping[str, float],
    tokens: Mapping[str, int],
) -> Artifact:
    """Fit the proxies' losses and write the proposed mixture, unless the store has it.

    Args:
        natural: weights of the mixture that the proposed one is compared with.
        tokens: training tokens of each source.

    Raises:
        ProfileError: the objective names a source without held-out text, or the losses cannot be fitted.
    """
    sources = list(natural)
    held_out = [name for name in data_sources.names(target.profile.data) if name in measured[0].losses]
    objective = dict(mixture.objective or natural)
    for name, weight in objective.items():
        if weight and name not in held_out:
            reason = f"has no held-out window of train.sequence_length {target.profile.train.sequence_length}"
            raise ProfileError(f"objective.{name}", weight, reason, held_out)
    lowest, highest = laws_of.bounds(
        len(sources),
        least_weight(mixture, len(sources)),
        [tokens[name] for name in sources],
        target.tokens,
        mixture.maximum_passes,
    )
    weights = np.array([[proxy.weights.get(name, 0.0) for name in sources] for proxy in measured])
    losses = np.array([[proxy.losses[name] for name in held_out] for proxy in measured])
    settings = keys.forecast_target(target.profile)
    key = keys.proposal(
        KIND,
        settings,
        proxies=[weights.tolist(), losses.tolist()],
        objective=objective,
        bounds=[lowest.tolist(), highest.tolist()],
    )

    def compute() -> dict[str, Any]:
        try:
            laws = laws_of.fit(weights, losses)
        except ValueError as error:
            raise ProfileError("proxies", None, str(error)) from error
        aim = np.array([objective.get(name, 0.0) for name in held_out])
        found = _proposal(laws, held_out, aim, natural, lowest, highest)
        return {
            "share": SHARE,
            "objective": objective,
            "natural": dict(natural),
            **found,
            "passes": {name: part * target.tokens / tokens[name] for name, part in found["weights"].items()},
            "overrides": overrides_of(target.profile, found["weights"]),
            "left_out_error": _left_out(weights, losses, held_out),
            "proxies": [asdict(proxy) for proxy in measured],
        }

    facts = {"name": target.name, "settings": settings}
    return json_artifacts.get_or_create(store, ArtifactId(KIND, key), facts, compute, ("weights", "natural"))


def _proposal(
    laws: laws_of.MixtureLaws,
    held_out: Sequence[str],
    aim: np.ndarray,
    natural: Mapping[str, float],
    lowest: np.ndarray,
    highest: np.ndarray,
) -> dict[str, Any]:
    """Weights within the bounds with the lowest predicted mean loss, compared with the natural weights."""
    chosen, drawn = laws_of.propose(laws, aim, lowest, highest)
    # With as many digits as overrides have.
    best = {
        name: float(f"{weight:.{DIGITS}g}") for name, weight in zip(natural, chosen.tolist(), strict=True)
    }
    return {
        "weights": best,
        "weight_intervals": dict(zip(natural, column_intervals(drawn), strict=True)),
        "highest": dict(zip(natural, highest.tolist(), strict=True)),
        "losses": _compare(laws, held_out, aim, list(natural.values()), list(best.values())),
        "laws": {name: getattr(laws, name).tolist() for name in ("floor", "effects", "noise")},
    }


def profile_of(mixture: Mixture, target: PlannedRun, weights: Mapping[str, float]) -> str:
    """The YAML of the target's profile with these weights of its sources, named after the mixture."""
    overrides = [*target.overrides, *overrides_of(target.profile, weights)]
    return resolve.dump(resolve.load(mixture.target, overrides, mixture.name))


def outcome(proposal: Mapping[str, Any], losses: Mapping[str, float]) -> list[dict[str, Any]]:
    """Compare a proposal's forecasts with losses by source of a run with its weights; last row: the mean."""
    aim = proposal["objective"]
    mean = sum(weight * losses[name] for name, weight in aim.items() if weight) / sum(aim.values())
    rows = []
    for row in proposal["losses"]:
        reached = mean if row["source"] is None else losses[row["source"]]
        low, high = row["interval"]
        rows.append(
            {**row, "outcome": reached, "error": row["loss"] / reached - 1, "within": low <= reached <= high}
        )
    return rows


def _compare(
    laws: laws_of.MixtureLaws,
    held_out: Sequence[str],
    aim: np.ndarray,
    natural: Sequence[float],
    best: Sequence[float],
) -> list[dict[str, Any]]:
    """Losses of both mixtures by source, then their weighted mean, each with the intervals of a run."""
    pair = np.array(natural), np.array(best)
    before, after = ([*laws.losses(w), laws.losses(w) @ aim / aim.sum()] for w in pair)
    runs = (laws.outcomes(w, seed) for seed, w in enumerate(pair))  # (draws, sources) each
    old, new = (np.column_stack([drawn, drawn @ aim / aim.sum()]) for drawn in runs)
    return [
        {
            "source": name,  # None: the mean
            "natural": float(before[i]),
            "loss": float(after[i]),
            "interval": interval,
            "change": float(after[i] - before[i]),
            "change_interval": change,
        }
        for i, (name, interval, change) in enumerate(
            zip([*held_out, None], column_intervals(new), column_intervals(new - old), strict=True)
        )
    ]


def _left_out(weights: np.ndarray, losses: np.ndarray, held_out: Sequence[str]) -> dict[str, float] | None:
    """Leave-one-proxy-out forecasts: median relative error by source; None with too few proxies."""
    errors = laws_of.left_out_errors(weights, losses)
    if np.isnan(errors).any():
        return None
    return dict(zip(held_out, np.median(np.abs(errors), 0).tolist(), strict=True))


def column_intervals(values: np.ndarray) -> list[list[float]]:
    """Interval of each column (SHARE)."""
    ends: np.ndarray = np.quantile(values, [(1 - SHARE) / 2, (1 + SHARE) / 2], axis=0)
    return [[float(low), float(high)] for low, high in ends.T]
