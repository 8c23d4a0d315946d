"""Measure how long a checkpoint save stalls training, and how long loading at another topology takes.

One process has an optimizer of N parameters (600 MB of state for 50 million). Files are written to the disk of `--folder` and
synced. Figures are medians of alternating rounds; ratios are ours over the peer's in the same round.

    stall    time that training waits for an asynchronous save: `begin`, the slowdown of the next step or the wait of its update
             while states are copied, and `finish` once files are written; compared with a synchronous save, `torch.save` and
             plain DCP
    steps    a step of matrix products during a save, relative to one without a save
    load     one of four data-parallel ranks reads and verifies its part of a checkpoint that one process saved; compared with
             reading without verification, and with DCP's reader

The exit code is 1 if the stall is at least a tenth of the synchronous save.
"""

import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from benchmarks.harness.results import Results
from benchmarks.harness.timing import (
    alternate,
    alternate_timed,
    make_parser,
    median_ratio,
    print_table,
    seconds,
)
from parallel import Mesh, ShardedAdamW
from parallel.checkpoint import checkpoint, locations
from parallel.checkpoint.boxes import PREFIX, BoxedTensor, boxed_tensors
from parallel.checkpoint.checksums import FileDescription
from parallel.checkpoint.reader import Reader
from parallel.checkpoint.saver import Saver
from parallel.initialization import Normal
from parallel.layout import Layout, Section, parameter

TARGET = 0.1
ROWS, WIDTH = 4096, 1024  # of each parameter


def main() -> int:
    parser = make_parser(__doc__, rounds=3, out="checkpoints")
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: temporary)")
    options = parser.parse_args()
    keep = Results(options.out).turn
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    torch.set_num_threads(1)
    optimizer = make_optimizer(options.parameters, Mesh())
    steps: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="benchmarks-checkpoints-") as name:
        folder = Path(name)
        saver = Saver(optimizer, asynchronous=True)
        # Plans the files and allocates buffers, as a run's first save does.
        saver.begin(folder / "step_0", {})
        saver.finish()
        saves: dict[str, Callable[[Path], object]] = {
            "synchronous": lambda path: checkpoint.save(path, optimizer, {}),
            "torch.save": lambda path: save_torch(path, optimizer),
            "plain DCP": lambda path: dcp.save(
                states(optimizer), storage_writer=dcp.FileSystemWriter(path), no_dist=True
            ),
        }

        def timed_save(save: Callable[[Path], object]) -> float:
            duration = seconds(lambda: save(folder / "other"))
            locations.discard(folder / "other")
            return duration

        def stall() -> float:
            duration = stall_seconds(saver, folder / "other", steps)
            locations.discard(folder / "other")
            return duration

        sides = {name: lambda save=save: timed_save(save) for name, save in saves.items()}
        results = alternate({"stall": stall, **sides}, options.rounds, keep=keep)
        shard = make_optimizer(options.parameters, Mesh(data=4, rank=1))
        loads = {
            "load": lambda: load(folder / "step_0", shard, locations.read_marker(folder / "step_0")["files"]),
            "unverified": lambda: load(folder / "step_0", shard, None),
            "DCP load": lambda: load_dcp(folder / "step_0", shard),
        }
        results |= alternate_timed(loads, options.rounds, keep=keep)
        saver.close()
    return show(options.parameters, results, steps)


def make_optimizer(parameters: int, mesh: Mesh) -> ShardedAdamW:
    """An optimizer of 4M-element matrices with non-zero states."""
    named = []
    for number in range(max(1, parameters // (ROWS * WIDTH))):
        layout = Layout((Section("", (ROWS, WIDTH), None),), 1, Normal(1.0))
        weight = parameter(layout, torch.float32, torch.device("cpu"))
        nn.init.normal_(weight)
        named.append((f"layers.{number}.weight", weight))
    optimizer = ShardedAdamW(named, mesh)
    for bucket in optimizer.buckets:
        for state in bucket.states.values():
            state.copy_(bucket.master)
    return optimizer


def stall_seconds(saver: Saver, path: Path, steps: list[tuple[float, float]]) -> float:
    """Seconds that an asynchronous save blocks training; appends step times without and during the save."""
    usual = statistics.median(seconds(step) for _ in range(10))
    stall = seconds(lambda: saver.begin(path, {}))
    stall += max(0.0, seconds(step) - usual) + seconds(saver.optimizer.wait_for_copy)
    during = []
    while saver.writing:
        during.append(seconds(step))
    steps.append((usual, statistics.median(during or [usual])))
    return stall + seconds(saver.finish)


def step() -> None:
    x = torch.ones(512, 512)
    for _ in range(10):
        x = x @ x


def states(optimizer: ShardedAdamW) -> dict[str, torch.Tensor]:
    return {
        f"{PREFIX.get(state, state)}.{box.name}": view
        for box, views in optimizer.state_boxes()
        for state, view in views.items()
    }


def save_torch(path: Path, optimizer: ShardedAdamW) -> None:
    path.mkdir()
    with (path / "all.pt").open("wb") as file:
        torch.save({key: view.clone() for key, view in states(optimizer).items()}, file)
        file.flush()
        os.fsync(file.fileno())


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
        view: torch.Tensor = self.state_dict[index.fqn].views[index.offset]
        return view


def load(path: Path, optimizer: ShardedAdamW, files: dict[str, FileDescription] | None) -> None:
    Reader(path, files).load(boxed_tensors(optimizer.state_boxes()))


def load_dcp(path: Path, optimizer: ShardedAdamW) -> None:
    state = boxed_tensors(optimizer.state_boxes())
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), planner=LoadPlanner(), no_dist=True)


def show(parameters: int, results: dict[str, list[float]], steps: list[tuple[float, float]]) -> int:
    """Print the table; returns the exit code."""
    median = {side: f"{statistics.median(times):.3f}" for side, times in results.items()}
    usual, during = map(statistics.median, zip(*steps, strict=True))
    ratio = median_ratio(results["stall"], results["synchronous"])

    def over(ours: str, peer: str) -> str:
        return f"{median_ratio(results[ours], results[peer]):.3f}"

    rows = [
        ("stall of an asynchronous save", median["stall"], "", ""),
        ("synchronous save", median["synchronous"], f"{ratio:.3f}", f"< {TARGET}"),
        ("torch.save", median["torch.save"], over("stall", "torch.save"), ""),
        ("plain DCP", median["plain DCP"], over("stall", "plain DCP"), ""),
        ("step during a save", f"{during:.4f}", f"{during / usual:.2f}", ""),
        ("load of a quarter", median["load"], "", ""),
        ("without verification", median["unverified"], over("load", "unverified"), ""),
        ("DCP's reader", median["DCP load"], over("load", "DCP load"), ""),
    ]
    title = f"{parameters / 1e6:.0f} M parameters, {parameters * 12 / 1e6:.0f} MB of state"
    print_table(title, ("", "seconds", "ratio", "target"), rows)
    return int(ratio >= TARGET)


if __name__ == "__main__":
    sys.exit(main())
