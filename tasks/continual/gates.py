"""Gates of a round, and their table: conditions on losses and scores that decide on its promotion.

A condition is on `old` (all held-out sets but the round's own), `new` (the round's own), an origin (`first`, `round-N`,
`stand-in`, `run:NAME`), `source:NAME` or `task:NAME`. A loss on several sets is their mean per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from profiles.errors import ProfileError, closest
from profiles.schema import Gate
from tasks.continual.held_out import origin_of, source_of

OLD, NEW, SOURCE, TASK = "old", "new", "source:", "task:"
RISES = "rises"  # begins the limits of losses that must not rise
COLUMNS = ("set", "before", "after", "limit", "met")
NOTHING_OLD = (
    "cannot be evaluated: no earlier run of the series holds out text; name sources in continual.stand_in, or leave this gate "
    "out"
)
UNKNOWN_OLD = (
    "cannot be evaluated: nothing is held out of what the initial weights were trained on; name sources that stand for it in "
    "continual.stand_in, set continual.replay_from=generated, or set other gates"
)
NOTHING_NEW = (
    "cannot be evaluated: no source holds out a share of its new documents; set data.validation_fraction and use: split, or "
    "leave this gate out"
)
TOO_SHORT = (
    "cannot be evaluated: its held-out text is shorter than one window of train.sequence_length + 1 tokens; hold out more, or "
    "leave this gate out"
)
Sets = Mapping[str, Mapping[str, float]]  # loss and tokens of each held-out set, by name


@dataclass(frozen=True)
class Row:
    """A line of a round's table: what was measured, before and after, and its gate if it has one."""

    set: str
    before: float | None  # None if it was not measured
    after: float | None
    limit: str = ""
    met: bool | None = None  # None without a gate

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of the columns."""
        values = ["" if value is None else f"{value:.4f}" for value in (self.before, self.after)]
        return (self.set, *values, self.limit, {None: "", True: "yes", False: "no"}[self.met])

    @property
    def reason(self) -> str:
        """Why a gate that is not met is not."""
        before, after = self.before, self.after
        if before is None or after is None or not math.isfinite(before) or not math.isfinite(after):
            return f"{self.set} was not measured: it is {before} before and {after} after"
        moved = f"{'rose' if after > before else 'fell'} from {before:.4f} to {after:.4f}"
        moved = f"did not change at {after:.4f}" if after == before else moved
        return f"{self.set} {moved} (required: {self.limit})"


@dataclass(frozen=True)
class Verdict:
    """A round's table: its gates in the order of the profile, then what else was measured."""

    rows: Sequence[Row]
    error: str = ""  # why it could not be measured

    @property
    def missed(self) -> list[Row]:
        """The gates that are not met."""
        return [row for row in self.rows if row.met is False]

    @property
    def promotes(self) -> bool:
        """Whether every gate is met; never for a value that is not a number."""
        values = [value for row in self.rows for value in (row.before, row.after) if value is not None]
        return not self.error and not self.missed and all(map(math.isfinite, values))

    @property
    def reason(self) -> str:
        """Why the round is not promoted."""
        return self.error or "; ".join(row.reason for row in self.missed)

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """The table: its headings, then a line of cells for each row."""
        return [COLUMNS, *(row.cells for row in self.rows)]

    @property
    def text(self) -> str:
        """The table as aligned text."""
        return aligned(self.lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as columns of text, the first one aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    found = []
    for first, *others in lines:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        found.append("  ".join(cells).rstrip())
    return "\n".join(found)


def check_gates(gates: Sequence[Gate], sets: Iterable[str], origin: str, short: Iterable[str] = ()) -> None:
    """Check that each gate on held-out text names some. Raises ProfileError with the nearest valid names.

    Args:
        sets: names of the round's held-out sets.
        origin: name of the round, whose sets are new.
        short: names of sets that are too short to be evaluated.
    """
    known, too_short = [*selections(sets, origin)], selections(short, origin)
    for number, gate in enumerate(gates):
        if gate.on.startswith(TASK) or gate.on in known:
            continue
        reason, choices = "names no held-out text of the series", closest(gate.on, known)
        if too_short:  # of which several sources may be in one set
            reason += " that has at least one window"
        if gate.on in (OLD, NEW):
            reason, choices = NOTHING_OLD if gate.on == OLD else NOTHING_NEW, []
        if gate.on in too_short:
            reason, choices = TOO_SHORT, []
        raise ProfileError(f"continual.gates.{number}.on", gate.on, reason, choices)


def tasks_of(gates: Sequence[Gate]) -> list[str]:
    """Names of the lm-eval tasks that gates are on, each once."""
    return list(dict.fromkeys(gate.on.removeprefix(TASK) for gate in gates if gate.on.startswith(TASK)))


def judge(
    gates: Sequence[Gate],
    before: Sets,
    after: Sets,
    origin: str,
    scores: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
) -> Verdict:
    """Decide about a round.

    Args:
        before: the promoted model's losses on the round's held-out sets.
        after: the round's.
        origin: name of the round, whose sets are new.
        scores: of the lm-eval tasks that gates are on, before and after.
    """
    selected = selections(after, origin)
    values = {name: (_mean(before, found), _mean(after, found)) for name, found in selected.items()}
    values |= {f"{TASK}{name}": (score, scores[1].get(name)) for name, score in scores[0].items()}
    rows = [_judged(gate, *values.get(gate.on, (None, None))) for gate in gates]
    gated = {gate.on for gate in gates}
    # Selections of the same sets are shown once, under the first name; a selection of all sets, such as the only source, is not.
    shown = {tuple(found): name for name, found in reversed(selected.items()) if len(found) < len(after)}
    others = [name for name in values if name not in gated and name in shown.values()]
    return Verdict([*rows, *(Row(name, *values[name]) for name in others)])


def losses(sets: Sets, origin: str) -> dict[str, float]:
    """A model's losses on `old` and `new` text, from its evaluated sets; origin: whose sets are new."""
    found = {name: _mean(sets, names) for name, names in selections(sets, origin).items()}
    return {name: loss for name in (OLD, NEW) if (loss := found.get(name)) is not None}


def selections(sets: Iterable[str], origin: str) -> dict[str, list[str]]:
    """The names that a gate may be on, and the held-out sets of each; those of `origin` are new."""
    found: dict[str, list[str]] = {}
    names = list(sets)
    for name in names:
        found.setdefault(NEW if origin_of(name) == origin else OLD, []).append(name)
    for name in names:
        found.setdefault(origin_of(name), []).append(name)
    for name in names:
        if source := source_of(name):
            found.setdefault(f"{SOURCE}{source}", []).append(name)
    return found


def _mean(sets: Sets, names: Sequence[str]) -> float | None:
    """Mean loss per token of some sets; None if one was not evaluated."""
    if any(name not in sets for name in names):
        return None
    tokens = sum(sets[name]["tokens"] for name in names)
    return sum(sets[name]["loss"] * sets[name]["tokens"] for name in names) / max(1, tokens)


def _judged(gate: Gate, before: float | None, after: float | None) -> Row:
    """The line of a gate. A value that is missing or not a number meets none."""
    if gate.at_least is not None:
        limit, met = f"at least {gate.at_least:g}", after is not None and after >= gate.at_least
    elif before is None or after is None:
        limit, met = _limit(gate), False
    elif gate.rise_at_most is not None:
        limit, met = _limit(gate), after - before <= gate.rise_at_most
    else:
        # Of a value that did not change, nothing was learned.
        limit, met = _limit(gate), before - after >= (gate.fall_at_least or 0.0) and after < before
    return Row(gate.on, before, after, limit, met)


def _limit(gate: Gate) -> str:
    """The condition of a gate, as shown in the column `limit`."""
    if gate.rise_at_most is not None:
        return f"{RISES} ≤ {gate.rise_at_most:g}"
    return f"falls ≥ {gate.fall_at_least:g}" if gate.fall_at_least else "falls"
