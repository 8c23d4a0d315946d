"""Evaluation results by step: RUN/evaluations.jsonl (only training writes metrics.jsonl).

A row has the step of a checkpoint, its digest, and numbers: validation_loss, validation_loss/<source>, user metrics, and
lm_eval/<task>/<metric>. Rows may be written in any order and long after training; of several values of a metric at a step, the
last counts. If a step was rolled back and written again, the rows of its earlier checkpoint do not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modeling.training.metrics import tag
from profiles.files import run_files, state_files
from profiles.files.jsonl import LogFollower, is_metrics
from tasks.store.store import Store

TENSORBOARD = "tensorboard/evaluations"  # separate from the folder that training writes


def record(
    store: Store, run: str, step: int, metrics: Mapping[str, float], checkpoint: str | None = None
) -> bool:
    """Add a checkpoint's results to the run's file and TensorBoard; False if the file has them already.

    Args:
        checkpoint: its digest.
    """
    folder = store.run_folder(run)
    with store.lock(f"evaluations-{run}"):
        data = folder.read(run_files.EVALUATIONS) or b""
        data += b"\n" * (not data.endswith(b"\n") and data != b"")  # after a line that was cut off
        rows = [row for line in data.splitlines() if (row := state_files.parse(line)) and is_metrics(row)]
        known = _merge(rows).get(step, {})
        origin = {"checkpoint": checkpoint} if checkpoint else {}
        if all(known.get(name) == value for name, value in {**origin, **metrics}.items()):
            return False
        row = {"step": step, "time": round(time.time(), 3), **origin, **metrics}
        folder.write(run_files.EVALUATIONS, data + json.dumps(row).encode() + b"\n")
    _write_tensorboard(folder.path, step, metrics)
    return True


def read(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics of each evaluated step of the run in this folder, in ascending order of steps."""
    return by_step(list(LogFollower(folder / run_files.EVALUATIONS).rows(is_metrics)))


def by_step(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Merge the rows of each step's last checkpoint, later ones over earlier; in ascending order of steps."""
    return {
        step: {name: value for name, value in merged.items() if name not in ("step", "time", "checkpoint")}
        for step, merged in sorted(_merge(rows).items())
    }


def _merge(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """As `by_step`, with all columns. Rows of earlier versions have no `checkpoint`."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged = found.setdefault(row["step"], {})
        if merged.get("checkpoint", row.get("checkpoint")) != row.get("checkpoint", merged.get("checkpoint")):
            merged.clear()
        merged.update(row)
    return found


def _write_tensorboard(folder: Path, step: int, metrics: Mapping[str, float]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / TENSORBOARD))
    for name, value in metrics.items():
        writer.add_scalar(tag(name), value, step)
    writer.close()
