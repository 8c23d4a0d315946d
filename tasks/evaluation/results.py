"""Evaluation results by step: RUN/evaluations.jsonl (only training writes metrics.jsonl).

A row has the step of a checkpoint and numbers: validation_loss, validation_loss/<source>, user metrics, and
lm_eval/<task>/<metric>. Rows may be written in any order and long after training; of several values of a metric at a step, the
last counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modeling import run_files
from modeling.training.metrics import tag
from tasks.launchers.log_follower import LogFollower, is_metrics
from tasks.store.store import Store

TENSORBOARD = "tensorboard/evaluations"  # separate from the folder that training writes


def record(store: Store, run: str, step: int, metrics: Mapping[str, float]) -> bool:
    """Add a checkpoint's results to the run's file and TensorBoard; False if the file has them already."""
    folder = store.run_folder(run)
    with store.lock(f"evaluations-{run}"):
        data = folder.read(run_files.EVALUATIONS) or b""
        known = by_step(_rows(data)).get(step, {})
        if all(known.get(name) == value for name, value in metrics.items()):
            return False
        row = {"step": step, "time": round(time.time(), 3), **metrics}
        folder.write(run_files.EVALUATIONS, data + json.dumps(row).encode() + b"\n")
    _write_tensorboard(folder.path, step, metrics)
    return True


def read(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics of each evaluated step of the run in this folder, in ascending order of steps."""
    return by_step(list(LogFollower(folder / run_files.EVALUATIONS).rows(is_metrics)))


def by_step(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Merge the rows of each step, later ones over earlier; in ascending order of steps."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["step"], {}).update(
            {name: value for name, value in row.items() if name not in ("step", "time")}
        )
    return dict(sorted(found.items()))


def _rows(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def _write_tensorboard(folder: Path, step: int, metrics: Mapping[str, float]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / TENSORBOARD))
    for name, value in metrics.items():
        writer.add_scalar(tag(name), value, step)
    writer.close()
