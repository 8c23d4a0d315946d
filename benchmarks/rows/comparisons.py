"""Comparisons of ours with a peer: training steps, a kernel, and ring attention, with their results.

Each has a `run` that alternates the sides and returns a `Result`: the figures, and whether the sides agree.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.harness.processes import Script, largest_difference, measure_script
from benchmarks.harness.timing import alternate
from benchmarks.harness.workload import WORKLOADS
from benchmarks.operators import ring_attention
from modeling.cores import usable_cores

THREADS = 2  # of a CPU, total for all processes of a side
TOLERANCES = {"float32": 1e-5, "bf16": 2e-2}  # relative, of each step's loss


@dataclass(frozen=True)
class Schedule:
    """How each comparison runs.

    Attributes:
        rounds: times that each side runs.
        warm_up, steps: untimed and timed steps of a run.
        graphs: the compiler's cache folder.
        cpu_time: whether to time training steps by CPU time, with one thread per process.
    """

    rounds: int
    warm_up: int
    steps: int
    graphs: str
    cpu_time: bool = False

    @property
    def arguments(self) -> list[str]:
        """Options of a measured module."""
        return ["--warm-up", str(self.warm_up), "--steps", str(self.steps)]


@dataclass
class Result:
    """Comparison result; ratio: the peer's time over ours in the same round, above 1 if ours is faster.

    Attributes:
        target, bound_target: smallest ratio, and smallest fraction of the bound, for the status "met".
        tokens: per step.
        ours, peer, bound: seconds of each round's median step.
        difference: largest relative difference between our losses (or outputs) and the peer's; at most `tolerance`.
        failure: why there are no figures.
        lacks: what the peer needs and this machine lacks, so that only ours was measured.
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
    lacks: str | None = None

    @property
    def ratios(self) -> list[float]:
        return [peer / ours for ours, peer in zip(self.ours, self.peer, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def of_bound(self) -> float | None:
        """The bound's time over ours."""
        if not self.bound:
            return None
        return statistics.median(bound / ours for bound, ours in zip(self.bound, self.ours, strict=True))

    @property
    def status(self) -> str:
        """ "failed" without figures or if results differ, "incomplete" without a peer, else "met" or "missed"."""
        if self.failure or not self.difference <= self.tolerance:  # a NaN difference fails
            return "failed"
        if self.lacks:
            return "incomplete"
        bound_met = self.bound_target is None or (self.of_bound or 0) >= self.bound_target
        return "met" if self.ratio >= self.target and bound_met else "missed"

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"row": self.name, "title": self.title, "against": self.against}
        document |= {"status": self.status, "target": self.target}
        if self.failure:
            return {**document, "failure": self.failure}
        ours = statistics.median(self.ours)
        document |= {"ours_seconds": ours, "tokens_per_second": self.tokens and self.tokens / ours}
        if self.lacks:
            return {**document, "lacks": self.lacks}
        return {
            **document,
            "peer_seconds": statistics.median(self.peer),
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
class TrainingComparison:
    """Training steps, ours against a peer's.

    Attributes:
        peer: module of `benchmarks.training_steps` and its arguments.
        ours: arguments of `benchmarks.training_steps.ours`.
        bound_target: fraction of the lower bound (`benchmarks.training_steps.bound`) to reach; None if there is no bound.
        requires: package that the peer needs besides torch.
        tolerance: largest relative difference of each step's loss; None: that of the precision.
        lacks: what the peer needs and this machine lacks: ours is measured alone.
        update: compare updates, from summed gradients to new weights, instead of steps.
    """

    name: str
    title: str
    against: str
    target: float
    peer: tuple[str, ...]
    ours: tuple[str, ...] = ()
    processes: int = 2
    precision: str = "float32"
    compiled: bool = False
    bound_target: float | None = None
    workload: str = "small"
    device: str = "cpu"
    requires: str | None = None
    tolerance: float | None = None
    lacks: str | None = None
    update: bool = False

    @property
    def measured(self) -> tuple[object, ...]:
        """What determines our side's measurement."""
        return self.ours, self.processes, self.precision, self.compiled, self.workload

    def turns(self, schedule: Schedule) -> int:
        """How many scripts run."""
        return schedule.rounds * (1 + (not self.lacks) + bool(self.bound_target))

    def run(self, schedule: Schedule, before_turn: Callable[[str], object]) -> Result:
        common = ["--workload", self.workload, "--precision", self.precision, "--device", self.device]
        threads = THREADS if self.device == "cpu" else usable_cores()  # beside a GPU, they compile
        common += ["--threads", str(1 if schedule.cpu_time else max(1, threads // self.processes))]
        common += ["--cpu-time"] * schedule.cpu_time
        common += [*schedule.arguments, *(["--graphs", schedule.graphs] if self.compiled else [])]
        module, *arguments = self.peer
        ours, peer = (*self.ours, *common), (*arguments, *common)
        scripts = {"ours": Script("training_steps.ours", ours, self.processes, self.device)}
        if not self.lacks:
            scripts["peer"] = Script(f"training_steps.{module}", peer, self.processes, self.device)
        if self.bound_target:
            scripts["bound"] = Script("training_steps.bound", tuple(common))
        tolerance = self.tolerance or TOLERANCES[self.precision]
        row = (self.name, self.title, self.against, self.target, tolerance, self.bound_target)
        tokens = WORKLOADS[self.workload].tokens
        figures = alternate_scripts(scripts, schedule, before_turn, self.update)
        return Result(*row, tokens=tokens, lacks=self.lacks, **figures)


@dataclass(frozen=True)
class KernelComparison:
    """A kernel of training on one device, ours against a library's.

    Attributes:
        kernel: name in `benchmarks.operators.kernels`.
        peer: the library to compare with.
        sizes: name of the operands' sizes.
        requires, lacks: as of `TrainingComparison`.
    """

    name: str
    title: str
    against: str
    kernel: str
    peer: str
    sizes: str
    device: str = "cuda"
    requires: str | None = None
    target: float = 0.95
    processes: int = 1
    lacks: str | None = None

    @property
    def measured(self) -> tuple[object, ...]:
        """What determines our side's measurement."""
        return self.kernel, self.sizes

    def turns(self, schedule: Schedule) -> int:
        """How many scripts run."""
        return schedule.rounds * (1 + (not self.lacks))

    def run(self, schedule: Schedule, before_turn: Callable[[str], object]) -> Result:
        sides = {"ours": "ours"} if self.lacks else {"ours": "ours", "peer": self.peer}
        common = ("--sizes", self.sizes, "--device", self.device, *schedule.arguments)
        scripts = {
            side: Script("operators.kernels", (self.kernel, argument, *common), device=self.device)
            for side, argument in sides.items()
        }
        row = (self.name, self.title, self.against, self.target, TOLERANCES["bf16"])
        return Result(*row, lacks=self.lacks, **alternate_scripts(scripts, schedule, before_turn))


def alternate_scripts(
    scripts: Mapping[str, Script],
    schedule: Schedule,
    before_turn: Callable[[str], object],
    update: bool = False,
) -> dict[str, Any]:
    """Run scripts in turn; returns each side's seconds by round, and `difference`, that of their losses.

    Args:
        update: take the seconds of updates instead of those of steps.
    """
    sides = {side: partial(measure_script, script) for side, script in scripts.items()}
    runs = alternate(sides, schedule.rounds, before_turn)
    seconds = {side: [run.median_seconds(update) for run in measured] for side, measured in runs.items()}
    return {**seconds, "difference": largest_difference(runs["ours"] + runs.get("peer", []))}


@dataclass(frozen=True)
class RingComparison:
    """Ring attention over two devices against the ideal: half the time of the same attention on one.

    On a CPU, the two devices are processes with one thread each, and the single device is a process with two threads.

    Attributes:
        blocks: measure, on one device, the blocks of the first of so many ranks without communication; None: a ring of two.
    """

    name: str
    tokens: int
    target: float = ring_attention.TARGET
    precision: str = "float32"
    heads: ring_attention.Heads = ring_attention.SMALL_HEADS
    device: str = "cpu"
    requires: str | None = None
    blocks: int | None = None

    @property
    def title(self) -> str:
        return f"blocks of a rank of CP {self.blocks}" if self.blocks else "ring attention, CP 2"

    @property
    def processes(self) -> int:
        return 1 if self.blocks else ring_attention.RANKS

    @property
    def against(self) -> str:
        tokens = f"{self.tokens // 1024}k" if self.tokens >= 1024 else self.tokens
        if self.device == "cpu" and not self.blocks:
            return f"one process, {tokens} tokens"
        return f"one device / {self.blocks or ring_attention.RANKS}, {tokens} tokens"

    def turns(self, schedule: Schedule) -> int:
        """Runs of both sides, and one more of each, which warms up and computes the outputs."""
        return 2 * (schedule.rounds + 1)

    def run(self, schedule: Schedule, before_turn: Callable[[str], object]) -> Result:
        workload = ring_attention.Workload(self.tokens, self.precision, self.heads)
        sides = ring_attention.make_sides(self.device, self.blocks)
        difference, seconds = ring_attention.compare(sides, workload, schedule.rounds, before_turn)
        tolerance = ring_attention.TOLERANCES[workload.precision]
        common = (self.name, self.title, self.against, self.target, tolerance)
        ours, peer = seconds["ours"], seconds["peer"]
        return Result(*common, tokens=self.tokens, ours=ours, peer=peer, difference=difference)


Comparison = TrainingComparison | KernelComparison | RingComparison
