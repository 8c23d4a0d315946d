"""Proposed replay shares in the store: the best share by the proxies' losses, with intervals.

A proposal is an immutable artifact whose key covers the target's settings, the proxies' shares and losses, the loss before the
round, the gate on old text and the objective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from modeling.scaling.planned_run import PlannedRun
from modeling.scaling.shares import Proposal, ShareLaws, fit_shares, propose_share
from profiles.errors import ProfileError
from profiles.experiments import Share
from profiles.schema import Profile
from tasks import keys
from tasks.experiments import json_artifacts
from tasks.experiments.mixtures import SHARE as PROBABILITY
from tasks.experiments.mixtures import column_intervals
from tasks.store.artifacts import Artifact, ArtifactId
from tasks.store.store import Store

KIND = "share"
SETS = ("old", "new")


@dataclass(frozen=True)
class Measured:
    """A finished proxy: its share, and its losses on old and new held-out text in nats per token."""

    name: str
    share: float
    losses: Mapping[str, float]


def limit_of(profile: Profile) -> float:
    """By how much the old loss may rise, by the gates of a profile; infinite without such a gate."""
    limits = [gate.rise_at_most for gate in profile.continual.gates if gate.on == "old"]
    return min((limit for limit in limits if limit is not None), default=math.inf)


def write_proposal(
    store: Store,
    described: Share,
    target: PlannedRun,
    before: Mapping[str, float],
    measured: Sequence[Measured],
) -> Artifact:
    """Fit the proxies' losses and write the proposed share, unless the store has it.

    Args:
        before: old and new loss of the proxy in place of the promoted model.

    Raises:
        ProfileError: the losses cannot be fitted.
    """
    shares = [proxy.share for proxy in measured]
    losses = np.array([[proxy.losses[name] for name in SETS] for proxy in measured])
    limit = limit_of(target.profile)
    given = {str(name): weight for name, weight in described.objective.items()}
    weights = {name: given.get(name, 0.0) for name in SETS}
    settings = keys.forecast_target(target.profile)
    # A gate's limit is infinite if there is none, which JSON has no number for.
    fitted = {"proxies": [shares, losses.tolist()], "before": dict(before), "limit": str(limit)}
    key = keys.proposal(KIND, settings, **fitted, objective=weights)

    def compute() -> dict[str, Any]:
        try:
            laws = fit_shares(shares, losses)
        except ValueError as error:
            raise ProfileError("shares", None, str(error)) from error
        aim = (weights["old"], weights["new"])
        found = propose_share(laws, before["old"], limit, aim, max(shares))
        return {
            "probability": PROBABILITY,
            "objective": weights,
            "limit": None if math.isinf(limit) else limit,
            **_describe(laws, found, before),
            "proxies": [asdict(proxy) for proxy in measured],
        }

    facts = {"name": described.series or target.name, "settings": settings}
    return json_artifacts.get_or_create(store, ArtifactId(KIND, key), facts, compute, ("share", "interval"))


def _describe(laws: ShareLaws, found: Proposal, before: Mapping[str, float]) -> dict[str, Any]:
    """The proposal with its intervals, its losses before and after, and the fitted losses as lines."""
    expected, without = laws.losses(found.share), laws.losses(0.0)
    intervals = column_intervals(laws.outcomes(found.share))
    return {
        "share": found.share,
        "interval": column_intervals(found.draws[:, None])[0],
        "meets": found.meets,
        "losses": [
            {
                "set": name,
                "before": before[name],
                "without": float(without[number]),
                "loss": float(expected[number]),
                "interval": intervals[number],
            }
            for number, name in enumerate(SETS)
        ],
        "overrides": [f"continual.replay={found.share:g}"],
        "laws": {
            "width": laws.width,
            **{
                name: {part: getattr(law, part).tolist() for part in ("floor", "effects", "noise")}
                for name, law in zip(SETS, (laws.old, laws.new), strict=True)
            },
        },
    }


def fitted_lines(proposal: Mapping[str, Any], points: int) -> dict[str, list[tuple[float, float]]]:
    """The fitted losses of a proposal as points (share, loss), up to the largest share of a proxy."""
    highest = max(proxy["share"] for proxy in proposal["proxies"])
    losses = np.array([[proxy["losses"][name] for name in SETS] for proxy in proposal["proxies"]])
    laws = fit_shares([proxy["share"] for proxy in proposal["proxies"]], losses, draws=1)
    shares = np.linspace(0, highest, points).tolist()
    found = np.array([laws.losses(share) for share in shares])
    return {
        name: list(zip(shares, found[:, number].tolist(), strict=True)) for number, name in enumerate(SETS)
    }
