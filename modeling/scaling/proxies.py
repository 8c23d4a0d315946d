"""Runs of a mixture file: small runs of the target's family, each with different source weights.

Weights are spread evenly over all mixtures with at least the minimum weight of each source: a Kronecker sequence of the
generalised golden ratio (Roberts 2018), mapped to the simplex by the gaps between its sorted coordinates. A longer sequence
begins with the shorter one, so a larger count keeps the earlier proxies. A proxy's data has only the sources of its group, so
proxies that were trained before a source was added remain the same runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from modeling.scaling.planned_run import PlannedRun, proxy_run, target_of
from profiles.errors import ProfileError
from profiles.experiments import Mixture
from profiles.rules import data_sources
from profiles.schema import Profile

PROXIES_PER_SOURCE = 4
MIN_SHARE = 0.1  # default of minimum_weight, as a share of equal weights
DIGITS = 4  # decimals of sampled weights


@dataclass(frozen=True)
class Proxy:
    """A small run with given weights of its sources, from whose losses a mixture is proposed.

    Attributes:
        sources: the training sources of its group.
        weights: by source, with sum 1; None: the natural mixture, the sources' shares of the tokens.
    """

    run: PlannedRun
    sources: tuple[str, ...]
    weights: Mapping[str, float] | None

    @property
    def name(self) -> str:
        return self.run.name


def spread_weights(k: int, count: int, least: float) -> list[list[float]]:
    """The first `count` mixtures of k sources, spread evenly over those with at least `least` of each."""
    ratio = 2.0
    for _ in range(60):  # the positive root of x^k = x + 1
        ratio = (1 + ratio) ** (1 / k)
    steps = ratio ** -np.arange(1, k)  # (k - 1)
    rows = []
    for number in range(1, count + 1):
        cuts = np.sort((0.5 + number * steps) % 1)
        shares = np.diff(cuts, prepend=0.0, append=1.0)
        row = [round(float(least + (1 - k * least) * share), DIGITS) for share in shares]
        row[int(np.argmax(row))] += 1 - sum(row)
        rows.append([round(weight, DIGITS) for weight in row])
    return rows


def training_sources(profile: Profile) -> list[str]:
    """Names of the sources that are trained on, in order."""
    names = data_sources.names(profile.data)
    return [
        name for name, source in zip(names, profile.data.sources, strict=True) if source.use != "validation"
    ]


def least_weight(mixture: Mixture, k: int) -> float:
    """The least weight of each of k sources. Raises ProfileError if their sum would exceed 1."""
    least = mixture.minimum_weight or MIN_SHARE / k
    if least * k >= 1:
        raise ProfileError(
            "minimum_weight", least, f"leaves nothing to vary among {k} sources", [f"{MIN_SHARE / k:.3g}"]
        )
    return least


def mixture_target(mixture: Mixture) -> PlannedRun:
    """The target. Raises ProfileError if it has no mixture to choose or lacks a source of the objective."""
    target = target_of(mixture)
    profile = target.profile
    sources = training_sources(profile)
    if len(sources) < 2:
        reason = "has one training source; a mixture needs at least two in data.sources"
        raise ProfileError("target", mixture.target, reason)
    if profile.data.schedule:
        reason = "changes the mixture during training; a mixture file proposes constant weights, so remove it"
        raise ProfileError("data.schedule", None, reason, ["[]"])
    if profile.objective.traits.reads_records:
        raise ProfileError("target", mixture.target, "is not a pretraining run; a mixture is for pretraining")
    known = data_sources.names(profile.data)
    for name in mixture.objective:
        if name not in known:
            reason = "is not a source of the target"
            raise ProfileError(f"objective.{name}", mixture.objective[name], reason, known)
    if mixture.objective and not any(mixture.objective.values()):
        raise ProfileError("objective", None, "gives all sources weight 0")
    return target


def proxies_of(mixture: Mixture, target: PlannedRun) -> list[Proxy]:
    """The proxies, group by group. Raises ProfileError with the group's key if one is impossible."""
    sources = training_sources(target.profile)
    known: set[str] = set()
    found: list[Proxy] = []
    names: set[tuple[str, ...]] = set()
    for number, group in enumerate(mixture.proxies):
        key = f"proxies.{number}.sources"
        for name in group.sources or ():
            if name not in sources:
                raise ProfileError(key, name, "is not a training source of the target", sources)
        ours = tuple(name for name in sources if group.sources is None or name in group.sources)
        if ours in names:
            raise ProfileError(
                key, list(ours), "are the sources of an earlier group; raise its count instead"
            )
        if len(ours) < len(sources) and target.profile.tokenizer.source == "train":
            reason = (
                "is trained on the sources, so groups with fewer sources would have another tokenizer; name a fixed one, such as "
                "run:NAME of a finished run"
            )
            raise ProfileError("tokenizer.source", "train", reason)
        count = group.count or PROXIES_PER_SOURCE * (len(set(ours) - known) or 1)
        # Of groups with equally many sources, only the first is named by the number alone.
        earlier = sum(len(each) == len(ours) for each in names)
        prefix = f"{mixture.name}-{len(ours)}" + (f".{earlier + 1}" if earlier else "")
        names.add(ours)
        known |= set(ours)
        found += _group(mixture, target, ours, count, prefix)
    if tuple(sources) not in names:
        missing = [name for name in sources if name not in known]
        reason = f"has no group over all sources{f', {missing[0]} too' if missing else ''}; add one: {{}}"
        raise ProfileError("proxies", None, reason)
    if len(found) < len(sources) + 2:
        reason = (
            f"makes {len(found)} proxies, too few for {len(sources)} sources; at least {len(sources) + 2}"
        )
        raise ProfileError("proxies.0.count", mixture.proxies[0].count, reason)
    return found


def proposed(mixture: Mixture, target: PlannedRun, weights: Mapping[str, float], name: str) -> Proxy:
    """A proxy with the proposed weights."""
    return _proxy(mixture, target, tuple(weights), weights, name)


def overrides_of(profile: Profile, weights: Mapping[str, float]) -> list[str]:
    """Weights by training source, as overrides of a profile."""
    names = data_sources.names(profile.data)
    return [
        f"data.sources.{names.index(name)}.weight={weight:.{DIGITS}g}" for name, weight in weights.items()
    ]


def _group(
    mixture: Mixture, target: PlannedRun, sources: tuple[str, ...], count: int, prefix: str
) -> list[Proxy]:
    """The natural mixture of some sources, and sampled ones; `prefix`: of the runs' names."""
    k = len(sources)
    given = dict(zip(data_sources.names(target.profile.data), target.profile.data.sources, strict=True))
    natural = None
    weighted = {name: weight for name in sources if (weight := given[name].weight)}
    if len(weighted) == len(sources):
        total = sum(weighted.values())
        natural = {name: weight / total for name, weight in weighted.items()}
    found = [_proxy(mixture, target, sources, natural, f"{prefix}-natural")]
    for number, row in enumerate(spread_weights(k, count - 1, least_weight(mixture, k)), 1):
        weights = dict(zip(sources, row, strict=True))
        found.append(_proxy(mixture, target, sources, weights, f"{prefix}-{number:02d}"))
    return found


def _proxy(
    mixture: Mixture,
    target: PlannedRun,
    sources: Sequence[str],
    weights: Mapping[str, float] | None,
    name: str,
) -> Proxy:
    """A proxy; a schedule replaces equal source weights from the first step, so all share a dataset."""
    profile, size = target.profile, mixture.proxy
    kept = []
    for known, source in zip(data_sources.names(profile.data), profile.data.sources, strict=True):
        if source.use == "validation" or known in sources:
            weight = 1.0 if weights and source.use != "validation" else None
            weighted = source.model_copy(update={"weight": weight})
            kept.append(weighted.model_dump(mode="json", exclude_none=True))
    changes = [f"data.sources={json.dumps(kept)}", "evaluate.by_source=true"]
    if weights:
        change = {"step": 1, "weights": [weights[known] for known in sources]}
        changes.append(f"data.schedule={json.dumps([change])}")
    run = proxy_run(mixture, target, size, size.tokens_per_parameter, name, mixture.proxy_overrides, changes)
    return Proxy(run, tuple(sources), weights)
