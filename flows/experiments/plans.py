"""Plans of a ladder, a mixture, a share or branches, within the budget and on this machine's devices.

Neither needs Prefect: the commands plan before they import it, and the flows again.
"""

from __future__ import annotations

from collections.abc import Sequence

from modeling.planning import planner
from modeling.planning.auto import resolve_auto
from modeling.planning.planner import Plan, plan
from modeling.scaling.planned_run import PlannedRun, base_of, rungs_of, target_of
from modeling.scaling.proxies import Proxy, mixture_target, proxies_of
from profiles import resolve
from profiles.errors import ProfileError
from profiles.experiments import Branches, Experiment, Ladder, Mixture, Share, load_experiment
from tasks.continual import series
from tasks.experiments.branches import branches_of, require_members, trunk_of
from tasks.store.store import Store


def load_ladder(file: str) -> tuple[Ladder, PlannedRun, list[PlannedRun], list[Plan]]:
    """Ladder, target, rungs and plans. Raises ProfileError if one cannot run or all exceed the budget."""
    ladder = load_experiment(Ladder, file)
    target = target_of(ladder)
    rungs = rungs_of(ladder, target)
    return ladder, target, rungs, plan_within(ladder, rungs)


def load_mixture(file: str) -> tuple[Mixture, PlannedRun, list[Proxy], list[Plan]]:
    """Mixture, target, proxies and plans. Raises ProfileError if one cannot run or all exceed the budget."""
    mixture = load_experiment(Mixture, file)
    target = mixture_target(mixture)
    proxies = proxies_of(mixture, target)
    return mixture, target, proxies, plan_within(mixture, [proxy.run for proxy in proxies])


def load_share(file: str) -> tuple[Share, PlannedRun, PlannedRun]:
    """Share file, target, and the proxy in place of the promoted model. Raises ProfileError."""
    described = load_experiment(Share, file)
    target = target_of(described)
    settings = resolve.load(described.target, [*described.overrides, *described.round_overrides]).continual
    if settings.replay_from == "generated":
        reason = "is sampled from the promoted model, which proxies are not; find the share with history or continual.stand_in"
        raise ProfileError("continual.replay_from", "generated", reason, ["history"])
    if settings.is_trunk:
        reason = "continues the promoted model's optimizer, which proxies do not have; find the share of rounds with rewarm"
        raise ProfileError("continual.schedule", "trunk", reason, ["rewarm"])
    return described, target, base_of(described, target)


def require_series(described: Share, target: PlannedRun, store: Store) -> None:
    """Raise ProfileError if the store has no finished model of the series of a share file."""
    name = described.series or target.name
    if series.promoted_model(store, name) is None:
        raise no_series(name, store)


def no_series(name: str, store: Store) -> ProfileError:
    """The error for a series that has no finished model."""
    reason = f"has no finished model to continue in {store.location}; train it first"
    return ProfileError("series", name, reason)


def load_branches(
    file: str, store: Store | None = None
) -> tuple[Branches, PlannedRun, list[PlannedRun], list[Plan]]:
    """Load a branches file with its trunk, branches and plans. Raises ProfileError if one cannot run."""
    described = load_experiment(Branches, file)
    trunk = trunk_of(described, store)
    branches = branches_of(described, trunk)
    if trunk.profile.lora.rank and described.averages:
        reason = "need full weights, but this profile trains LoRA adapters"
        raise ProfileError("averages", None, reason)
    require_members(described, trunk, branches)
    return described, trunk, branches, plan_within(described, [trunk, *branches])


def plan_within(experiment: Experiment, runs: Sequence[PlannedRun]) -> list[Plan]:
    """Plan the runs. Raises ProfileError if one does not fit its devices or all exceed the budget."""
    plans = []
    for run in runs:
        profile = resolve_auto(run.profile)
        plans.append(plan(profile))
        planner.require_fit(profile, plans[-1])
    largest = max(run.profile.world_size for run in runs)
    if experiment.devices is not None and experiment.devices < largest:
        raise ProfileError("devices", experiment.devices, f"is less than the {largest} of one run", [largest])
    flops = sum(run.flops for run in runs)
    if experiment.maximum_flops is not None and flops > experiment.maximum_flops:
        reason = f"is exceeded: the runs take {flops:.3g} FLOPs; remove the largest, or shorten them"
        raise ProfileError("maximum_flops", experiment.maximum_flops, reason)
    if experiment.maximum_price is None:
        return plans
    prices = [planned.price for planned in plans if planned.price is not None]
    if len(prices) < len(plans):
        reason = "cannot be checked: the price of a run is unknown; set cluster.node_price"
        raise ProfileError("maximum_price", experiment.maximum_price, reason, ["null"])
    price = sum(each * run.share for each, run in zip(prices, runs, strict=True))
    if price > experiment.maximum_price:
        reason = f"is exceeded: the runs cost {price:,.2f}; remove the largest, or shorten them"
        raise ProfileError("maximum_price", experiment.maximum_price, reason)
    return plans


def require_startable(runs: Sequence[PlannedRun]) -> None:
    """Raise ProfileError for a run whose data or devices are not on this machine."""
    for run in runs:
        resolve.check_start(run.profile)
        planner.require_devices(run.profile)
