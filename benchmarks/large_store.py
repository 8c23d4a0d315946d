"""Time `runs` and `gc` on a store with many runs: CPU and wall seconds, first and again.

Also prints how long new runs wait for gc's lock.

Each run has the files of a finished one: profile, records, rows of metrics, checkpoints, logs and an export; each also has an
artifact of its own. `python -m cProfile -s tottime -m benchmarks.large_store` shows the functions that take the most time.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from benchmarks.harness.results import Results
from benchmarks.harness.timing import make_parser
from flows.cli.main import main as trainshed
from profiles.resolve import dump, load
from tasks.store import locks
from tasks.store.artifacts import ArtifactId
from tasks.store.manifest import Manifest
from tasks.store.store import Store

BEGIN = 1_790_000_000.0
STEPS = 20
CHECKPOINTS = 3
GARBAGE = 10  # one of so many runs has an artifact that nothing refers to


def main() -> None:
    parser = make_parser(__doc__, rounds=2, out="large_store")
    parser.add_argument("--runs", type=int, default=3000)
    parser.add_argument("--files", type=int, default=40, help="of each run")
    options = parser.parse_args()
    results = Results(options.out)
    with tempfile.TemporaryDirectory() as folder:
        total = write_store(Path(folder), options.runs, options.files)
        results.add("store", f"{options.runs:,} runs, {total:,} files", runs=options.runs, files=total)
        for number in range(options.rounds):
            for command in (["runs"], ["gc"], *([["gc", "--yes"]] if number + 1 == options.rounds else [])):
                measure(Path(folder), command, results)


def measure(folder: Path, command: list[str], results: Results) -> None:
    """Print the time of a command, and for how long it kept its lock from others."""
    ended = threading.Event()
    held = [0.0]

    def watch() -> None:
        while not ended.wait(0.05):
            held[0] += 0.05 * bool(locks.holder(Store(str(folder)).backend, "locks/gc"))

    watcher = threading.Thread(target=watch)
    if command == ["gc", "--yes"]:
        watcher.start()
    begun, cpu = time.perf_counter(), time.process_time()
    with redirect_stdout(StringIO()):
        trainshed([*command, "--store", str(folder)])
    wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    ended.set()
    lock = f", lock held for about {held[0]:.1f} s" if held[0] else ""
    name = " ".join(command)
    results.add(
        name, f"{name:<10} {wall:6.2f} s, {cpu:6.2f} s of CPU{lock}", wall=wall, cpu=cpu, lock=held[0]
    )


def write_store(folder: Path, runs: int, files: int) -> int:
    """Write the runs and their artifacts; returns the number of files."""
    profile = dump(load("tiny", [f"train.steps={STEPS}"], "run")).encode()
    rows = "".join(
        json.dumps({"step": step, "loss": 5.0, "step_seconds": 1.0, "time": BEGIN + 60 + step}) + "\n"
        for step in range(1, STEPS + 1)
    )
    started = {"event": "started", "begun": BEGIN, "time": BEGIN + 60, "restore_seconds": 5.0, "step": 0}
    started |= {"steps": STEPS, "step_tokens": 4096, "node_count": 1, "node_price": None, "dropped": {}}
    released = locks._state(60.0, released=True)
    written = 0

    def write(path: Path, data: str | bytes) -> None:
        nonlocal written
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        written += 1

    def artifact(kind: str, key: str, requires: Sequence[ArtifactId] = ()) -> None:
        where = folder / f"artifacts/{kind}/{key}"
        write(where / "data.bin", key)
        write(folder / f"locks/{kind}-{key}/1", released)
        write(
            where / "manifest.json", Manifest.of_folder(where, ArtifactId(kind, key), {}, requires).to_bytes()
        )

    artifact("tokenizer", "shared")
    for number in range(runs):
        run = folder / f"runs/run-{number}"
        key = f"key-{number}"
        artifact("evaluation", key, [ArtifactId("tokenizer", "shared")])
        if number % GARBAGE == 0:
            artifact("evaluation", f"unused-{number}")
        used = {"evaluation": [key], "tokenizer": ["shared"], "dataset": [key], "graphs": [key]}
        records = {
            "run.json": {"identity": str(number)},
            "artifacts.json": used,
            "inputs.json": {
                "identity": str(number),
                "tokenizer": "shared",
                "dataset": key,
                "checkpoint": None,
            },
            "plan.json": {"step_seconds": 0.9, "tokens_per_second": 4096 / 0.9},
            "report.json": {"evaluation": {"step": STEPS, "validation_loss": 5.0}},
        }
        texts = {name: json.dumps(value) for name, value in records.items()}
        texts |= {"metrics.jsonl": rows, "attempts.jsonl": json.dumps(started) + "\n"}
        for name, value in texts.items():
            write(run / name, value)
        write(run / "profile.yaml", profile)
        write(folder / f"locks/run-run-{number}/1", released)
        for step in range(STEPS - CHECKPOINTS + 1, STEPS + 1):
            for name in ("0.distcp", "0.distcp.checksums", ".metadata", "complete.json"):
                write(run / f"checkpoints/step_{step}/{name}", "{}")
        for rest in range(files - len(texts) - 2 - 4 * CHECKPOINTS):
            write(run / f"logs/train-{rest}.log", "line\n")
    return written


if __name__ == "__main__":
    main()
