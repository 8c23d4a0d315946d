"""What saving costs a training loop, and loading at another topology: `python -m benchmarks.checkpoints [--parameters N]`

One process, an optimizer of N parameters (600 MB of state for 50 million), files on the disk that `--folder` is on, each synced.
Sides run in turns; a figure is the median of the rounds, a ratio ours over the peer's of the same round.

    stall    what training waits for: `begin`, what the states' copying takes of the next step or its update waits for, and
             `finish` of a save beside it, against the same save at once, `torch.save` of the same state, and plain DCP; a save
             beside training is finished once it is written, as the loop does it
    steps    a step of matrix products while a save is being written, over one while none is
    load     what one of four data ranks needs of a checkpoint that one process saved, against DCP's own reader of it

Exit code 1 where the stall is not under a tenth of the save at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from parallel import Mesh, ZeRO1
from parallel.checkpoint import checkpoint
from parallel.checkpoint.boxes import PREFIX, BoxedTensor, boxed_tensors
from parallel.checkpoint.reader import Reader
from parallel.initialization import Normal
from parallel.layout import Layout, Section, parameter

TARGET = 0.1
WIDTH = 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.checkpoints", description=__doc__.splitlines()[0].split(":")[0]
    )
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to write to (default: the system's temporary one)"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    torch.set_num_threads(1)
    ours = make(options.parameters, Mesh())
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="benchmarks-checkpoints-") as name:
        folder = Path(name)
        beside = checkpoint.Saver(ours, asynchronous=True)
        beside.begin(folder / "step_0", {})  # makes the plan and the memory, as a run's first save does
        beside.finish()
        sides: dict[str, Callable[[Path], float]] = {
            "beside": lambda place: save_beside(beside, place, seconds),
            "at once": lambda place: timed(lambda: checkpoint.save(place, ours, {})),
            "torch.save": lambda place: timed(lambda: save_torch(place, ours)),
            "plain DCP": lambda place: timed(lambda: save_dcp(place, ours)),
        }
        for _ in range(options.rounds):
            for side, act in sides.items():
                seconds.setdefault(side, []).append(act(folder / "other"))
                checkpoint.discard(folder / "other")
        part = make(options.parameters, Mesh(data=4, rank=1))
        for _ in range(options.rounds):
            seconds.setdefault("load", []).append(timed(lambda: load_ours(folder / "step_0", part)))
            seconds.setdefault("DCP load", []).append(timed(lambda: load_dcp(folder / "step_0", part)))
        beside.close()
    return show(options.parameters, seconds)


def make(parameters: int, mesh: Mesh) -> ZeRO1:
    """An optimizer over matrices of some millions of elements, with states that are not zero."""
    rows = 4096
    count = max(1, parameters // (rows * WIDTH))
    named = []
    for number in range(count):
        layout = Layout((Section("", (rows, WIDTH), None),), 1, Normal(1.0))
        weight = parameter(layout, torch.float32, torch.device("cpu"))
        nn.init.normal_(weight)
        named.append((f"layers.{number}.weight", weight))
    made = ZeRO1(named, mesh)
    for bucket in made.buckets:
        bucket.exp_avg.copy_(bucket.master)
        bucket.exp_avg_sq.copy_(bucket.master)
    return made


def timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def save_beside(saver: checkpoint.Saver, place: Path, seconds: dict[str, list[float]]) -> float:
    """Seconds that the loop waits: in the save's calls, and in the step beside which the states are copied, over a usual one."""
    usual = statistics.median(timed(step) for _ in range(10))
    seconds.setdefault("step", []).append(usual)
    stall = timed(lambda: saver.begin(place, {}))
    stall += max(0.0, timed(step) - usual) + timed(saver.optimizer.wait_for_copy)
    while saver.writing:
        seconds.setdefault("step beside", []).append(timed(step))
    return stall + timed(saver.finish)


def step() -> None:
    x = torch.ones(512, 512)
    for _ in range(10):
        x = x @ x


def states(optimizer: ZeRO1) -> dict[str, torch.Tensor]:
    return {
        f"{PREFIX[state]}.{piece.name}": view
        for piece, views in optimizer.state_boxes()
        for state, view in views.items()
    }


def save_torch(place: Path, optimizer: ZeRO1) -> None:
    place.mkdir()
    with (place / "all.pt").open("wb") as file:
        torch.save({key: view.clone() for key, view in states(optimizer).items()}, file)
        file.flush()
        os.fsync(file.fileno())


def save_dcp(place: Path, optimizer: ZeRO1) -> None:
    dcp.save(states(optimizer), storage_writer=dcp.FileSystemWriter(place), no_dist=True)


def load_ours(place: Path, optimizer: ZeRO1) -> None:
    Reader(place).load(boxed_tensors(optimizer.state_boxes(), PREFIX))


class LoadPlanner(DefaultLoadPlanner):
    """DCP's load planner over a state dict of `BoxedTensor`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, BoxedTensor],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].views[index.offset]


def load_dcp(place: Path, optimizer: ZeRO1) -> None:
    state = boxed_tensors(optimizer.state_boxes(), PREFIX)
    dcp.load(state, storage_reader=dcp.FileSystemReader(place), planner=LoadPlanner(), no_dist=True)


def show(parameters: int, seconds: dict[str, list[float]]) -> int:
    """Print the table; the exit code."""
    table = Table(title=f"{parameters / 1e6:.0f} M parameters, {parameters * 12 / 1e6:.0f} MB of state")
    for heading in ("", "seconds", "ratio", "due"):
        table.add_column(heading, justify="left" if not heading else "right")

    def row(name: str, ours: str, peer: str | None = None, due: str = "") -> float:
        pairs = zip(seconds[ours], seconds[peer], strict=False) if peer else ()
        ratio = statistics.median(a / b for a, b in pairs) if peer else float("nan")
        table.add_row(
            name, f"{statistics.median(seconds[peer or ours]):.3f}", f"{ratio:.3f}" if peer else "", due
        )
        return ratio

    row("stall of a save beside training", "beside")
    ratio = row("the same save at once", "beside", "at once", f"< {TARGET}")
    row("torch.save", "beside", "torch.save")
    row("plain DCP", "beside", "plain DCP")
    slower = statistics.median(seconds["step beside"]) / statistics.median(seconds["step"])
    table.add_row(
        "a step while a save is written",
        f"{statistics.median(seconds['step beside']):.4f}",
        f"{slower:.2f}",
        "",
    )
    row("load of a quarter", "load")
    row("DCP's own reader", "load", "DCP load")
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return int(ratio >= TARGET)


if __name__ == "__main__":
    sys.exit(main())
