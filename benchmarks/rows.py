"""The rows of the table: what is compared with what, how much faster ours has to be, and whether both did the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import ring_attention
from benchmarks.sitting import Measured, Script, ScriptError, Turn, alternate
from benchmarks.work import WORKS

THREADS = 2  # of all processes of a side together
TOLERANCES = {"float32": 1e-5, "bf16": 2e-2}  # relative, of each step's loss


@dataclass(frozen=True)
class Plan:
    """How long a sitting is.

    Attributes:
        rounds: how often each side of a row runs.
        warm_up, steps: of each run, not timed and timed.
        graphs: folder for compiled graphs.
    """

    rounds: int
    warm_up: int
    steps: int
    graphs: str


@dataclass
class Result:
    """What a row came to. A ratio is the peer's time over ours, of the same round: above 1 ours is faster.

    Attributes:
        ours, peer, bound: seconds of each round's median step.
        difference: the largest relative one between ours and the peer's losses (or results); it must stay within `tolerance`.
        failure: why there is nothing to compare.
    """

    name: str
    title: str
    against: str
    target: float
    tolerance: float = 0.0
    bound_target: float | None = None
    tokens: int | None = None
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)
    difference: float = math.nan
    failure: str | None = None

    @property
    def ratios(self) -> list[float]:
        return [peer / ours for ours, peer in zip(self.ours, self.peer, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def ours_seconds(self) -> float:
        return statistics.median(self.ours)

    @property
    def peer_seconds(self) -> float:
        return statistics.median(self.peer)

    @property
    def of_bound(self) -> float | None:
        """The bound's time over ours."""
        if not self.bound:
            return None
        return statistics.median(bound / ours for ours, bound in zip(self.ours, self.bound, strict=True))

    @property
    def status(self) -> str:
        """ "failed" without results or where they differ, else "met" or "missed"."""
        if self.failure or not self.difference <= self.tolerance:
            return "failed"
        bound_met = self.bound_target is None or (self.of_bound or 0) >= self.bound_target
        return "met" if self.ratio >= self.target and bound_met else "missed"

    def document(self) -> dict[str, Any]:
        """For JSON."""
        common = {"row": self.name, "title": self.title, "against": self.against}
        common |= {"status": self.status, "target": self.target}
        if self.failure:
            return {**common, "failure": self.failure}
        return {
            **common,
            "ours_seconds": self.ours_seconds,
            "peer_seconds": self.peer_seconds,
            "tokens_per_second": self.tokens and self.tokens / self.ours_seconds,
            "ratio": self.ratio,
            "spread": [min(self.ratios), max(self.ratios)],
            "ratios": self.ratios,
            "bound_seconds": statistics.median(self.bound) if self.bound else None,
            "of_bound": self.of_bound,
            "bound_target": self.bound_target,
            "difference": self.difference,
            "tolerance": self.tolerance,
        }


@dataclass(frozen=True)
class Training:
    """A row of training steps, ours against a peer's.

    Attributes:
        ours: its arguments.
        peer: module and arguments.
        compiled: whether both compile.
        bound_target: fraction of the bound, where the row has one.
        work: one of `work.WORKS`.
    """

    name: str
    title: str
    against: str
    ours: tuple[str, ...]
    peer: tuple[str, ...]
    target: float
    processes: int = 2
    precision: str = "float32"
    compiled: bool = False
    bound_target: float | None = None
    work: str = "small"
    device: str = "cpu"

    def turns(self, plan: Plan) -> int:
        """How many runs it takes."""
        return plan.rounds * (3 if self.bound_target else 2)

    def run(self, plan: Plan, turn: Turn) -> Result:
        module, *arguments = self.peer
        sides = {
            "ours": Script("ours", self.ours, self.processes),
            "peer": Script(f"peers.{module}", tuple(arguments), self.processes),
        }
        if self.bound_target:
            sides["bound"] = Script("bound")
        common = ["--work", self.work, "--precision", self.precision, "--device", self.device]
        common += ["--threads", str(THREADS // self.processes)]
        common += ["--warm-up", str(plan.warm_up), "--steps", str(plan.steps)]
        if self.compiled:
            common += ["--graphs", plan.graphs]
        measured = alternate(sides, plan.rounds, common, turn)
        result = Result(self.name, self.title, self.against, self.target, TOLERANCES[self.precision])
        result.bound_target, result.tokens = self.bound_target, WORKS[self.work].tokens
        for side, runs in measured.items():
            setattr(result, side, [each.step for each in runs])
        result.difference = difference(measured["ours"] + measured["peer"])
        return result


def difference(runs: Sequence[Measured]) -> float:
    """The largest relative difference between losses of the same step in any two runs; NaN where one is NaN."""
    worst = 0.0
    for losses in zip(*(each.losses for each in runs), strict=True):
        if any(map(math.isnan, losses)):
            return math.nan
        worst = max(worst, (max(losses) - min(losses)) / min(map(abs, losses)))
    return worst


@dataclass(frozen=True)
class Ring:
    """Ring attention over two processes against the same attention in one process with as many threads."""

    name: str
    tokens: int
    title: str = "ring attention, CP 2"
    target: float = ring_attention.TARGET

    @property
    def against(self) -> str:
        return f"one process, {self.tokens // 1024}k tokens"

    def turns(self, plan: Plan) -> int:
        """How many runs it takes; of each side one is to warm up, which also gives the results."""
        return 2 * (plan.rounds + 1)

    def run(self, plan: Plan, turn: Turn) -> Result:
        work = ring_attention.Work(self.tokens, "float32")
        tolerance = ring_attention.TOLERANCES[work.precision]
        result = Result(self.name, self.title, self.against, self.target, tolerance, tokens=self.tokens)
        ring, one = ring_attention.Side(THREADS, 1), ring_attention.Side(1, THREADS)
        try:
            with turn("ours"):
                found = ring.results(work)
            with turn("peer"):
                expected = one.results(work)
            result.difference = max(map(ring_attention.error, found, expected))
            for _ in range(plan.rounds):
                with turn("ours"):
                    result.ours.append(ring.seconds(work))
                with turn("peer"):
                    result.peer.append(one.seconds(work))
        except EOFError:
            raise ScriptError("a process of benchmarks.ring_attention died") from None
        return result


ROWS: tuple[Training | Ring, ...] = (
    Training(
        "float32",
        "one process, float32",
        "Hugging Face",
        ours=(),
        peer=("hugging_face",),
        target=1.10,
        processes=1,
        bound_target=0.88,
    ),
    Training(
        "compiled",
        "one process, float32, compiled",
        "Hugging Face, compiled",
        ours=(),
        peer=("hugging_face",),
        target=1.15,
        processes=1,
        compiled=True,
        bound_target=0.92,
    ),
    Training(
        "bf16",
        "one process, bf16",
        "Hugging Face",
        ours=(),
        peer=("hugging_face",),
        target=1.25,
        processes=1,
        precision="bf16",
        bound_target=0.80,
    ),
    Training(
        "tensor",
        "TP 2",
        "DTensor",
        ours=("--tensor", "2"),
        peer=("dtensor",),
        target=1.25,
    ),
    Training(
        "sequence",
        "TP 2 with SP",
        "DTensor with SP",
        ours=("--tensor", "2", "--sequence-parallel"),
        peer=("dtensor", "--sequence-parallel"),
        target=1.35,
    ),
    Training(
        "data",
        "DP 2 with ZeRO-1",
        "ZeroRedundancyOptimizer",
        ours=(),
        peer=("zero_redundancy",),
        target=1.10,
    ),
    Training(
        "context",
        "CP 2",
        "torch's balanced ring",
        ours=("--context", "2"),
        peer=("torch_ring",),
        target=1.10,
    ),
    Training(
        "pipeline",
        "PP 2, 1F1B",
        "torch's pipelining",
        ours=("--pipeline", "2"),
        peer=("torch_pipeline",),
        target=1.10,
    ),
    Ring("ring-8k", 8192),
    Ring("ring-32k", 32768),
)
