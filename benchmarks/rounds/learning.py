"""What rounds learn and forget, by share of replay and by replayed data; ten rounds in a row.

The old language is that of the first run, the new one that of the rounds. A share is best if the mean of old and new loss is
lowest among shares at which the old loss rises by at most LIMIT.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.training import BATCH
from benchmarks.rounds.series import SMALLER, Reptile, Series
from modeling.scaling.shares import fit_shares, propose_share
from tasks.continual.held_out import round_origin
from tasks.store.artifacts import Artifact

Row = dict[str, Any]
SWEEP = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
PROXY_SHARES = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5)
FIRST_STEPS, ROUND_STEPS = 300, 400
FIRST_DOCUMENTS, DOCUMENTS = 500, 200
RATE = "train.learning_rate=3e-3"  # of a single round, half of that of the first run
LIMIT = 0.01
REPTILES = (Reptile(10, 0.5), Reptile(50, 0.5))
# Of rounds in a row, which keep the first run's rate. With 150 steps each, they end 0.03 to 0.055 above one run.
ROUNDS, SHARE, SHORT_DOCUMENTS = 10, 0.75, 80


def learning(folder: Path) -> Iterator[Row]:
    """One round: without replay, with a sweep of shares, with the proposed one, and with other data."""
    series, origin = Series(folder), round_origin(1)
    first = series.begin(FIRST_DOCUMENTS)
    promoted = series.train("first", first, FIRST_STEPS)
    new = series.add(1, DOCUMENTS)
    before = series.evaluate(promoted, new).losses(origin)
    yield {"row": "before", **before}

    def round_of(name: str, share: float, **given: Any) -> Row:
        dataset = series.with_replay(new, share, ROUND_STEPS, given.pop("known", None))
        model = series.train(name, dataset, ROUND_STEPS, promoted, RATE, **given)
        return {"row": name, "share": share, **_changes(before, model.losses(origin))}

    sweep = []
    for share in SWEEP:
        sweep.append(round_of(f"ledger {share:.0%}", share))
        yield sweep[-1]

    proposed = yield from _propose(series, first, new)
    share = proposed["share"]
    with_share = round_of("proposed", share)
    yield with_share
    windows = round(share * ROUND_STEPS * BATCH)
    yield round_of("generated", share, known=series.sampled(new, promoted, windows))
    yield round_of("stand-in", share, known=series.stand_in(FIRST_DOCUMENTS))
    for reptile in REPTILES:
        name = f"Reptile {reptile.rate:g} every {reptile.every} steps"
        yield round_of(name, share, reptile=reptile)

    best = min((row for row in sweep if row["old rise"] <= LIMIT), key=_mean, default=min(sweep, key=_mean))
    without = sweep[0]
    learned = with_share["new fall"] / without["new fall"]
    yield {"row": "old rises by more than 1 without replay", "old rise": without["old rise"],
           "met": without["old rise"] > 1}  # fmt: skip
    yield {"row": "old rises by at most 0.02 with the proposed share", "old rise": with_share["old rise"],
           "met": with_share["old rise"] <= 0.02}  # fmt: skip
    yield {"row": "new falls at least 90% as far", "as far": learned, "met": learned >= 0.9}
    distance, excess = abs(share - best["share"]), _mean(with_share) - _mean(best)
    yield {"row": "proposed share is the best one's", "best": best["share"], "share": share, "distance": distance,
           "outcome": excess, "met": distance <= 0.03 or excess <= 0.01}  # fmt: skip


def _propose(series: Series, first: Artifact, new: Artifact) -> Generator[Row, None, Row]:
    """Train the proxies and propose a share, which the last row has."""
    origin = round_origin(1)
    small = series.train("proxy", first, FIRST_STEPS, None, *SMALLER)
    before = series.evaluate(small, new, *SMALLER).losses(origin)
    yield {"row": "proxy before", **before}
    losses = []
    for share in PROXY_SHARES:
        dataset = series.with_replay(new, share, ROUND_STEPS)
        model = series.train(f"proxy {share:.0%}", dataset, ROUND_STEPS, small, RATE, *SMALLER)
        found = model.losses(origin)
        losses.append([found["old"], found["new"]])
        yield {"row": f"proxy {share:.0%}", "share": share, **_changes(before, found)}
    laws = fit_shares(PROXY_SHARES, np.array(losses))
    proposal = propose_share(laws, before["old"], LIMIT, (1.0, 1.0), max(PROXY_SHARES))
    low, high = np.quantile(proposal.draws, [0.05, 0.95]).tolist()
    row = {"row": "proposal", "share": proposal.share, "low": low, "high": high, "meets": proposal.meets}
    yield row
    return row


def ten_rounds(folder: Path) -> Iterator[Row]:
    """Ten rounds in a row, each with new text, and one run over all of it that draws as many tokens."""
    series = Series(folder)
    first = series.begin(FIRST_DOCUMENTS // 2)
    model = series.train("first", first, FIRST_STEPS)
    dataset = first
    for number in range(1, ROUNDS + 1):
        new = series.add(number, SHORT_DOCUMENTS)
        dataset = series.with_replay(new, SHARE, ROUND_STEPS)
        model = series.train(f"round {number}", dataset, ROUND_STEPS, model)
        yield {"row": f"after round {number}", **model.losses(round_origin(number))}
        series.promote(dataset)
    total = FIRST_STEPS + ROUNDS * ROUND_STEPS
    once = series.train("once", series.all_texts(), total, None, held_out=dataset)
    worst = -np.inf
    for name, found in model.sets.items():
        difference = found["loss"] - once.sets[name]["loss"]
        worst = max(worst, difference)
        yield {
            "row": name,
            "rounds": found["loss"],
            "once": once.sets[name]["loss"],
            "difference": difference,
        }
    yield {"row": "ten rounds end within 0.01 of one run", "worst": worst, "met": worst <= 0.01}


def _changes(before: dict[str, float], after: dict[str, float]) -> Row:
    return {**after, "old rise": after["old"] - before["old"], "new fall": before["new"] - after["new"]}


def _mean(row: Row) -> float:
    return float(row["old"] + row["new"]) / 2
