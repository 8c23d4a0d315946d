"""Time the page of all runs: a store's first read, a refresh, and showing the page in a browser.

Measures runs of N steps and of N / 10 steps, because the time must not depend on the length. Metrics files are hard links to a
few distinct ones, so they are in the page cache; their rows have the size of real ones. Before each refresh, `--changed` of the
runs get another row.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.results import Results
from benchmarks.harness.timing import make_parser
from tasks.fleet.fleet import CACHE, read_fleet
from tasks.fleet.page import render
from tasks.reporting import html
from tasks.store.store import Store

DISTINCT = 4  # metrics files
BEGIN = 1_790_000_000.0


def main() -> None:
    parser = make_parser(__doc__, rounds=5, out="fleet")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--changed", type=int, default=20)
    options = parser.parse_args()
    for steps in (options.steps // 10, options.steps):
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), options.runs, steps, options.changed, options.rounds, Results(options.out))


def measure(folder: Path, count: int, steps: int, changed: int, rounds: int, results: Results) -> None:
    """Print the times for a store with `count` runs."""
    size = write_store(folder, count, steps)
    store, page = Store(str(folder)), folder / "fleet.html"
    times: dict[str, list[tuple[float, float]]] = {"first read": [], "refresh": [], "browser": []}
    for _ in range(rounds):
        (store.local_cache / CACHE).unlink(missing_ok=True)
        times["first read"].append(timed(lambda: html.write(page, render(read_fleet(store)))))
        for number in range(changed):
            append(folder / f"runs/run-{number}", steps)
        times["refresh"].append(timed(lambda: html.write(page, render(read_fleet(store)))))
        times["browser"] += opening(page)
    print(
        f"{count:,} runs of {steps:,} steps, {size / 2**20:.0f} MiB of metrics each; page {page.stat().st_size / 1e6:.1f} MB"
    )
    for name, values in times.items():
        if values:
            walls, cpus = zip(*values, strict=True)
            spread = f"of {len(values)}: {min(walls):.2f} to {max(walls):.2f}"
            cpu = f", {statistics.median(cpus):.2f} s of CPU" if any(cpus) else ""
            text = f"  {name:<12} {statistics.median(walls):6.2f} s   ({spread}){cpu}"
            results.add(name, text, runs=count, steps=steps, walls=walls, cpus=cpus)


def opening(page: Path) -> list[tuple[float, float]]:
    """Time until the page is loaded and drawn in Chromium; empty if Chromium is not installed."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        return []
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1300, "height": 1000})
        seconds, _ = timed(lambda: (view.goto(page.resolve().as_uri()), view.screenshot()))
        browser.close()
    return [(seconds, 0.0)]  # the CPU time is spent in the browser's process


def write_store(folder: Path, count: int, steps: int) -> int:
    """Write the runs; returns the size of a metrics file."""
    sources = [folder / f"metrics-{number}.jsonl" for number in range(min(DISTINCT, count))]
    for number, path in enumerate(sources):
        with path.open("w") as file:
            file.writelines(row(step, number) for step in range(1, steps + 1))
    started = {"event": "started", "begun": BEGIN, "time": BEGIN + 60, "restore_seconds": 5.0, "step": 0}
    started |= {"steps": steps, "step_tokens": 4_194_304, "node_count": 4, "node_price": 30.0, "dropped": {}}
    for number in range(count):
        run = folder / f"runs/run-{number}"
        run.mkdir(parents=True)
        os.link(sources[number % len(sources)], run / "metrics.jsonl")
        (run / "attempts.jsonl").write_text(json.dumps(started) + "\n")
        (run / "run.json").write_text(json.dumps({"identity": str(number)}))
        evaluation = {"step": steps, "validation_loss": 2.0}
        (run / "report.json").write_text(json.dumps({"evaluation": evaluation}))
        (run / "plan.json").write_text(
            json.dumps({"step_seconds": 0.9, "tokens_per_second": 4_194_304 / 0.9})
        )
        event = {"event": "train retried", "time": BEGIN + 90}
        event["reason"] = f"rank 3 on n{number % 50} was killed"
        (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    return sources[0].stat().st_size


def row(step: int, number: int) -> str:
    """A row of metrics of 8 ranks."""
    seconds = ("data_wait_seconds", "forward_backward_seconds", "optimizer_seconds")
    contents = {
        "step": step, "loss": 2.0 + 8 * (1 + step / 50) ** -0.5 + number / 10, "learning_rate": 1e-4,
        "gradient_norm": 0.51, "parameter_norm": 120.3, "step_seconds": 1.0, "tokens_per_second": 4_194_304.0,
        **dict.fromkeys(seconds, 0.123456789), "mfu": 0.41, "consumed_samples": step * 512,
        "time": BEGIN + 60 + 1.05 * step, "trained_seconds": float(step), "checkpoint_seconds": step / 50,
        "evaluation_seconds": step / 80, "rank_seconds": [0.912345] * 8, "memory_bytes": 61_234_567_890, "skipped": False,
    }  # fmt: skip
    return json.dumps(contents) + "\n"


def append(run: Path, steps: int) -> None:
    """Append a row to a run's metrics file, after replacing a link by a copy."""
    path = run / "metrics.jsonl"
    if path.stat().st_nlink > 1:
        text = path.read_bytes()
        path.unlink()
        path.write_bytes(text)
    with path.open("a") as file:
        file.write(row(steps, 0))


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a call in this process."""
    begun, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - begun, time.process_time() - cpu


if __name__ == "__main__":
    main()
