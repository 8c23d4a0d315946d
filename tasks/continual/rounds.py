"""The rounds of a series, each with its data, losses on all held-out sets, outcome, time and cost.

`runs/<round>/round.json` records how a round was judged; it is written before its model is promoted.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from profiles.errors import ProfileError, closest
from profiles.files import run_files
from tasks.continual import series
from tasks.continual.gates import RISES, Row, Verdict
from tasks.continual.series import Promoted
from tasks.fleet.fleet import RunView, read_run
from tasks.inputs import EXPORT
from tasks.store import activities, ledger
from tasks.store.store import Store

PROMOTED, NOT_PROMOTED, FIRST = "promoted", "not promoted", "first run"
NUMBER = re.compile(r"-round-(\d+)(?:~(\d+))?$")


@dataclass(frozen=True)
class Round:
    """A round of a series, or its first run.

    Attributes:
        outcome: promoted, not promoted or first run; before it was judged, its run's state.
        rows: what was measured before and after, with the gates; empty before it was judged.
        seconds: that its jobs held their nodes.
    """

    run: str
    number: int  # 0: the first run
    outcome: str
    base: str = ""  # the run that it started from
    reason: str = ""  # why it was not promoted
    tokens: int | None = None  # to train on that are new
    replay: float | None = None  # share of replayed tokens
    rows: Sequence[Row] = ()
    time: float | None = None  # when it was judged, seconds since 1970
    seconds: float | None = None
    cost: float | None = None
    current: bool = False  # whether its model is the promoted one
    rolled_back: bool = False  # whether it was promoted, and an earlier model was promoted again

    @property
    def name(self) -> str:
        """Name in tables: first, or round-N."""
        return short_name(self.run) if self.number else "first"

    def row(self, name: str) -> Row | None:
        """What was measured on a selection, such as old."""
        return next((row for row in self.rows if row.set == name), None)


@dataclass(frozen=True)
class Series:
    """A series: its promoted model, and its rounds in order."""

    name: str
    promoted: Promoted
    rounds: Sequence[Round] = field(default_factory=list)


def record(store: Store, run: str, promoted: Promoted, verdict: Verdict, data: Mapping[str, Any]) -> None:
    """Record how a round was judged, in its run folder; `data` is the summary of its dataset."""
    facts = {
        "outcome": PROMOTED if verdict.promotes else NOT_PROMOTED,
        "reason": verdict.reason,
        "base": promoted.run,
        "dataset": promoted.dataset,  # of the first run, so that the rounds of a replaced one are told apart
        "tokens": data["tokens"],
        "replay": data.get("replay", 0.0),
        "rows": [asdict(row) for row in verdict.rows],
        "time": round(time.time(), 3),
    }
    store.run_folder(run).write(run_files.ROUND, json.dumps(facts, indent=1).encode())


def forgot(store: Store, run: str) -> bool:
    """Whether a round missed a gate because a loss rose too much, which more replay may prevent."""
    rows = [Row(**row) for row in store.run_folder(run).read_json(run_files.ROUND).get("rows", ())]
    return any(row.met is False and row.limit.startswith(RISES) for row in rows)


def short_name(run: str) -> str:
    """Name of a run within its series: first, or round-N."""
    found = NUMBER.search(run)
    return run[found.start() + 1 :] if found else "first"


def read_series(store: Store, name: str) -> Series:
    """Read a series. Raises ProfileError if there is no such series, with the nearest names."""
    promoted = series.promoted_model(store, name)
    if promoted is None:
        folders = [run for run, entry in store.backend.entries("runs").items() if entry.is_folder]
        started = [run for run in folders if not NUMBER.search(run) and "~" not in run]
        reason = f"is no series in {store.uri}: no run of this name was trained to its end and exported"
        raise ProfileError("name", name, reason, closest(name, started))
    rounds = [Round(name, 0, FIRST, **_facts(read_run(store, name)), current=promoted.run == name)]
    for run, number in _rounds(store, name):
        found = _read(store, run, number, promoted)
        if found is not None:
            rounds.append(found)
    return Series(name, promoted, _with_rolled_back(rounds, promoted))


def _with_rolled_back(rounds: Sequence[Round], promoted: Promoted) -> list[Round]:
    """The rounds, those marked that were promoted and do not lead to the promoted model any more.

    A round after the latest has been judged, and its model is about to be promoted.
    """
    bases, ancestors = {each.run: each.base for each in rounds}, [promoted.run]
    while (base := bases.get(ancestors[-1])) and base not in ancestors:
        ancestors.append(base)
    undone = {
        each.run
        for each in rounds
        if each.outcome == PROMOTED and each.number <= promoted.latest_round and each.run not in ancestors
    }
    return [replace(each, rolled_back=each.run in undone) for each in rounds]


def find_earlier(store: Store, name: str, run: str) -> Promoted:
    """The model of an earlier round, or of the first run, as promoted model of its series.

    Raises ProfileError if the run was never promoted in the series, with those that were.
    """
    found = read_series(store, name)
    promoted = [each for each in found.rounds if each.outcome in (PROMOTED, FIRST)]
    chosen = next((each for each in promoted if run in (each.run, each.name)), None)
    if chosen is None:
        reason = f"was not promoted in the series {name}"
        raise ProfileError("run", run, reason, [each.run for each in promoted])
    inputs = series.recorded_inputs(store, chosen.run)
    if inputs is None or ledger.find(store, inputs["identity"]) is None:
        reason = "has no entry in the ledger of the store, so its training data is unknown"
        raise ProfileError("run", chosen.run, reason)
    held_out = inputs["dataset"] if chosen.number else ""
    current = found.promoted
    return Promoted(
        chosen.run,
        inputs["identity"],
        chosen.number,
        current.tokenizer,
        current.dataset,
        held_out=held_out if current.held_out else "",
        latest=current.latest_round,
    )


def promote_earlier(store: Store, name: str, run: str) -> tuple[Promoted, Promoted]:
    """Make a run that was promoted earlier the promoted model again; returns the models before and after.

    The next round starts from its weights, trains on what is in no ledger entry of it or its ancestors, and is evaluated on the
    sets that they held out. A round that is running is waited for.

    Raises ProfileError if the run was never promoted in the series, or its model is no longer there.
    """
    find_earlier(store, name, run)  # before any wait
    with activities.begin(store, "continual", name):
        current = series.promoted_model(store, name)
        earlier = find_earlier(store, name, run)
        if current is None:  # find_earlier has rejected this
            raise ProfileError("name", name, "is no series")
        if current.run == earlier.run:
            return current, current
        series.latest_step(store, earlier)  # a round starts from its checkpoint
        if not store.run_folder(earlier.run).files(EXPORT):
            reason = (
                f"has no exported model in {store.run_folder(earlier.run).location(EXPORT)}; export it first"
            )
            raise ProfileError("run", earlier.run, reason)
        series.set_promoted(store, name, earlier)
        return current, earlier


def _rounds(store: Store, name: str) -> Iterable[tuple[str, int]]:
    """Name and number of each run of a round, in order; attempts that were moved aside come first."""
    found = []
    for run, entry in store.backend.entries("runs").items():
        match = NUMBER.search(run)
        if match and entry.is_folder and run[: match.start()] == name:
            found.append((int(match[1]), int(match[2] or 10**9), run))
    return [(run, number) for number, _, run in sorted(found)]


def _read(store: Store, run: str, number: int, promoted: Promoted) -> Round | None:
    """A round; None if it belongs to a replaced series of the same name."""
    facts = store.run_folder(run).require_json(run_files.ROUND) or {}
    if facts and facts.get("dataset") != promoted.dataset:
        return None
    view = read_run(store, run)
    outcome = facts.get("outcome", view.shown_state)
    known = {name: facts[name] for name in ("base", "reason", "tokens", "replay", "time") if name in facts}
    rows = [Row(**row) for row in facts.get("rows", ())]
    return Round(run, number, outcome, **known, rows=rows, **_facts(view), current=run == promoted.run)


def _facts(view: RunView) -> dict[str, Any]:
    """Time and cost of a run; nothing if its files cannot be read."""
    return {"seconds": view.use.total or None, "cost": view.cost}


def to_json(found: Series) -> Mapping[str, Any]:
    """What `trainshed series --json` prints, without the page."""
    return {
        "series": found.name,
        "promoted": asdict(found.promoted),
        "rounds": [asdict(each) for each in found.rounds],
    }
