"""`trainshed ladder|mixture|branches`: plan runs in a table, or train them and print what follows.

Each action loads and plans before Prefect is imported; `flows.experiments` has the flows.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from rich.console import Console

from flows.cli.exit_codes import DONE
from flows.cli.plan_table import in_days
from flows.cli.run import call_flow, run_flow
from flows.experiments.plans import (
    load_branches,
    load_ladder,
    load_mixture,
    load_share,
    require_series,
    require_startable,
)
from flows.ui.console import print_facts, print_json, print_parts, relative, table_console, waiting
from modeling.planning.auto import resolve_auto
from modeling.planning.planner import Plan, plan
from modeling.scaling.planned_run import PlannedRun, warnings_of
from modeling.scaling.proxies import Proxy
from profiles.errors import ProfileError
from profiles.experiments import Branches, load_experiment
from tasks.experiments.branches import trunk_of
from tasks.reporting.format import format_interval, format_time
from tasks.reporting.mixture_page import source_label
from tasks.store.store import Store


def ladder(options: argparse.Namespace) -> int:
    """Plan or run a ladder; returns the exit code. Raises ProfileError for an invalid ladder."""
    with _planning(options.file):
        described, target, rungs, plans = load_ladder(options.file)
    if options.action == "run":
        require_startable([*rungs, target] if options.target else rungs)
        start = call_flow("flows.experiments.ladder:ladder", options.file, options.store, options.target)
        return run_flow(options, target.profile, described.name, start, print_ladder)
    with _planning(options.file):
        goal = row_of(target, plan(resolve_auto(target.profile)))
    rows = [row_of(rung, planned) for rung, planned in zip(rungs, plans, strict=True)]
    total = total_of(rows, "all rungs")
    warnings = warnings_of(target, rungs)
    found = {"ladder": described.name, "rungs": rows, "total": total, "target": goal, "warnings": warnings}
    print_plan(options, found, [*rows, total, goal], described.name, warnings=warnings)
    return DONE


def mixture(options: argparse.Namespace) -> int:
    """Plan or run a mixture; returns the exit code. Raises ProfileError for an invalid one."""
    if options.action == "share":
        return _share(options)
    with _planning(options.file):
        described, target, proxies, plans = load_mixture(options.file)
    if options.action == "run":
        require_startable([proxy.run for proxy in proxies])
        start = call_flow("flows.experiments.mixture:mixture", options.file, options.store, options.check)
        return run_flow(options, target.profile, described.name, start, print_mixture)
    rows = [
        {**row_of(proxy.run, planned), "weights": proxy.weights, "mixture": _percent(proxy)}
        for proxy, planned in zip(proxies, plans, strict=True)
    ]
    total = total_of(rows, "all proxies")
    found = {"mixture": described.name, "proxies": rows, "total": total}
    print_plan(options, found, [*rows, total], described.name, without=("batch", "learning_rate"))
    return DONE


def _share(options: argparse.Namespace) -> int:
    """Find the share of replay of a series' next round, as `mixture`; also for a series without new data."""
    if options.check:
        raise ProfileError("--check", None, "has no effect with share; train a round with the proposed share")
    with _planning(options.file):
        described, target, base = load_share(options.file)
        store = Store(options.store, target.profile.cluster.work_dir or "store").existing()
        require_series(described, target, store)
    require_startable([base])
    start = call_flow("flows.experiments.share:share", options.file, options.store)
    return run_flow(options, target.profile, described.name, start, print_share)


def branches(options: argparse.Namespace) -> int:
    """Plan or run the branches; returns the exit code. Raises ProfileError for an invalid file."""
    store = None
    with _planning(options.file):
        if options.action == "run":  # which may extend a trunk of the store
            first = trunk_of(load_experiment(Branches, options.file)).profile
            store = Store(options.store, first.cluster.work_dir or "store")
        described, trunk, found, plans = load_branches(options.file, store)
    runs = [trunk, *found]
    if store is not None:
        require_startable(runs)
        start = call_flow("flows.experiments.branches:branches", options.file, options.store)
        return run_flow(options, trunk.profile, described.name, start, print_branches)
    rows = [row_of(run, planned) for run, planned in zip(runs, plans, strict=True)]
    total = total_of(rows, "all runs")
    scratch = sum(run.flops / run.share for run in found)
    document = {"branches": described.name, "runs": rows, "total": total, "from_scratch_flops": scratch}
    same = ("parameters", "batch", "learning_rate")  # for all runs
    print_plan(options, document, [*rows, total], described.name, without=same)
    if not options.json:
        print(f"\n{total['flops'] / scratch:.0%} of the compute of training each length from scratch")
    return DONE


def _planning(file: str) -> AbstractContextManager[None]:
    return waiting(lambda: f"planning {file}")


def short(number: float) -> str:
    """5464 -> '5.46K', 2714304 -> '2.71M'."""
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.3g}Z"


_interval = partial(format_interval, word="to")

# Key of a row: title and formatter of its column. Columns without any value are left out.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "mixture": ("mixture, %", str),
    "from": ("from step", "{:,}".format),
    "parameters": ("parameters", short),
    "tokens": ("tokens", short),
    "steps": ("steps", "{:,}".format),
    "batch": ("batch", "{:,}".format),
    "learning_rate": ("lr", "{:.2g}".format),
    "devices": ("devices", "{:,}".format),
    "flops": ("FLOPs", short),
    "days": ("time", in_days),
    "price": ("price", "{:,.2f}".format),
}


def row_of(run: PlannedRun, planned: Plan) -> dict[str, Any]:
    """The row of a run, without the steps inherited from another; None where a speed or price is unknown."""
    train = run.profile.train
    return {
        "run": run.name,
        "parameters": planned.parameters,
        "n": run.n,
        "from": run.first_step or None,
        "tokens": round(run.tokens * run.share),
        "steps": train.steps,
        "batch": train.global_batch_size,
        "learning_rate": train.learning_rate,
        "devices": run.profile.world_size,
        "flops": run.flops,
        "days": None if planned.days is None else planned.days * run.share,
        "price": None if planned.price is None else planned.price * run.share,
    }


def total_of(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Sums over runs; None where a run's value is unknown."""
    found: dict[str, Any] = {"run": name}
    for key in ("tokens", "flops", "days", "price"):
        values = [row[key] for row in rows]
        found[key] = None if None in values else sum(values)
    return found


def print_plan(
    options: argparse.Namespace,
    document: Mapping[str, Any],
    rows: Sequence[dict[str, Any]],
    experiment: str,
    *,
    without: Collection[str] = (),
    warnings: Sequence[str] = (),
) -> None:
    """Print the document with `--json`, else a table of the rows, named without the experiment's prefix.

    Args:
        without: columns to leave out.
        warnings: printed below the table.
    """
    if options.json:
        print_json(document)
        return
    columns = [key for key in COLUMNS if key not in without and any(row.get(key) is not None for row in rows)]
    prefix = f"{experiment}-"
    lines = []
    for row in rows:
        cells = (COLUMNS[key][1](row[key]) if row.get(key) is not None else "" for key in columns)
        lines.append([row["run"].removeprefix(prefix), *cells])
    console = table_console()
    print_parts(console, [f"{prefix}…", *(COLUMNS[key][0] for key in columns)], lines, left=1)
    for warning in warnings:
        console.print(f"\nwarning: {warning}", style="yellow")


def _percent(proxy: Proxy) -> str:
    """Weights of a proxy in percent, in the order of its sources."""
    return " ".join(f"{100 * weight:.0f}" for weight in (proxy.weights or {}).values()) or "natural"


def print_ladder(console: Console, result: dict[str, Any]) -> None:
    """Print the forecast, the outcome if the target was trained, and the path of the page."""
    facts = {
        "forecast": f"{result['loss']:.4f} for {result['target']['name']}",
        f"{result['share']:.0%} interval": _interval(result["interval"]),
        "written": format_time(result["written"]),
    }
    for name, row in result["metrics"].items():
        facts[name] = f"{row['value']:.4f}, {_interval(row['interval'])}"
    if outcome := result.get("outcome"):
        facts["outcome"] = _compared(outcome)
    for row in result["budgets"][1:]:
        if "gain" in row:
            facts["10x compute"] = f"{-row['gain']:+z.4f} nats per token"
    facts["page"] = relative(result["page"])
    console.print()
    print_facts(console, facts)


def print_mixture(console: Console, result: dict[str, Any]) -> None:
    """Print weights and losses by source, how to apply the weights, and the path of the page."""
    share = f"{result['share']:.0%} interval"
    losses = [("held-out loss", "natural", "proposed", share, "change")]
    for row in result["losses"]:
        values = f"{row['natural']:.4f}", f"{row['loss']:.4f}", _interval(row["interval"])
        losses.append((source_label(row["source"]), *values, f"{row['change']:+z.4f}"))
    weights = [("weight", "natural", "proposed", share, "times read")]
    for name, weight in result["weights"].items():
        interval = _interval(result["weight_intervals"][name], ".1%")
        passes = f"{result['passes'][name]:.2g}"
        weights.append((name, f"{result['natural'][name]:.1%}", f"{weight:.1%}", interval, passes))
    facts = {}
    if outcome := result.get("outcome"):
        facts["outcome"] = f"mean {_compared(outcome[-1])}"
    facts["settings"] = _settings(result["overrides"])
    facts["or run"] = f"trainshed run {shlex.quote(relative(result['profile']))}"
    _print_proposal(console, (weights, losses), facts, result["page"])


def print_share(console: Console, result: dict[str, Any]) -> None:
    """Print the proxies' losses, the expected ones, the proposed share, and how to apply it."""
    proxies = [("share of replay", "old loss", "new loss")]
    for proxy in result["proxies"]:
        old, new = proxy["losses"].values()
        proxies.append((f"{proxy['share']:.1%}", f"{old:.4f}", f"{new:.4f}"))
    name = f"{result['probability']:.0%} interval"
    losses = [("held-out loss", "before", "proposed", name, "change")]
    for row in result["losses"]:
        values = f"{row['before']:.4f}", f"{row['loss']:.4f}", _interval(row["interval"])
        losses.append((row["set"], *values, f"{row['loss'] - row['before']:+z.4f}"))
    facts = {"share": f"{result['share']:.1%}, {name} {_interval(result['interval'], '.1%')}"}
    if not result["meets"]:
        facts["gate"] = f"no share keeps the rise of the old loss within {result['limit']:g}"
    facts["settings"] = _settings(result["overrides"])
    _print_proposal(console, (proxies, losses), facts, result["page"])


def print_branches(console: Console, result: dict[str, Any]) -> None:
    """Print the loss of each length and each average, and the paths of averaged models and the page."""
    console.print()
    names = [row["run"] for row in result["runs"]] + [row["average"] for row in result["averages"]]
    width = max(map(len, names))
    for row in result["runs"]:
        console.print(f"{row['run']:<{width}}  {row['steps']:>8,} steps  loss {row['validation_loss']:.4f}")
    for row in result["averages"]:
        count = len(row["members"])
        console.print(f"{row['average']:<{width}}  {count:>2} checkpoints  loss {row['validation_loss']:.4f}")
        console.print(f"  model: {relative(row['model'])}", soft_wrap=True, markup=False)
    console.print(f"\npage: {relative(result['page'])}", soft_wrap=True, markup=False)


def _compared(outcome: Mapping[str, Any]) -> str:
    """A loss that was measured after its forecast."""
    inside = "inside" if outcome["within"] else "outside"
    return f"{outcome['outcome']:.4f}, {inside} the interval; forecast {outcome['error']:+z.2%}"


def _settings(overrides: Sequence[str]) -> str:
    return " ".join(f"--set {shlex.quote(override)}" for override in overrides)


def _print_proposal(
    console: Console, tables: Sequence[Sequence[Sequence[str]]], facts: dict[str, str], page: str
) -> None:
    """Print tables, each with its titles first, and facts; all columns but the first hold numbers."""
    for titles, *rows in tables:
        console.print()
        print_parts(console, titles, rows, left=1)
    console.print()
    print_facts(console, {**facts, "page": relative(page)})
