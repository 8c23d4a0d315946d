"""Metrics and events of a run: metrics.jsonl, TensorBoard files, log lines and events.jsonl."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from modeling.supervision.time_account import TOTALS
from profiles.files import run_files, state_files

log = logging.getLogger(__name__)

OF_TASKS = "lm_eval/"  # prefix of metrics of language-model tasks, whose names are tags already
# Suffixes of metrics with a number for each layer, or each distance of multi-token prediction, and the number of the first.
LISTS = {"_by_layer": 0, "_by_depth": 1}
# TensorBoard tag groups; a metric in none of them is a user metric, named after its function.
GROUPS = {
    "loss": ("loss", "validation_loss", "validation_tokens", "mtp_loss"),
    "optimizer": (
        "learning_rate",
        "gradient_norm",
        "parameter_norm",
        "skipped",
        "max_logit",
        "clipped_heads",
    ),
    "speed": ("tokens_per_second", "mfu"),
    "time": (
        "step_seconds",
        "data_wait_seconds",
        "forward_backward_seconds",
        "optimizer_seconds",
        "communication_seconds",
    ),
    "memory": ("memory_bytes",),
    "consumed": ("consumed_samples", "consumed_tokens"),
    "goodput": TOTALS,
    "graphs": ("graph_cache_misses", "graph_cache_hits"),
    "experts": ("balance_loss", "router_z_loss", "expert_load_max", "dropped_choices"),
    "device": (
        "device_utilization",
        "device_memory_bytes",
        "device_power_watts",
        "device_celsius",
        "host_memory_bytes",
        "host_memory_share",
        "host_cpu_cores",
    ),
}

# Metrics by their names up to version 0.2.0, as metrics.jsonl of older runs has them.
RENAMED = {"cold_compiles": "graph_cache_misses", "warm_graphs": "graph_cache_hits"}


class MetricsWriter:
    """Writes a run's metrics on the leading rank.

    While the disk is full, rows are buffered and written later, each one complete or not at all. The file is replaced on resume,
    so an orphaned earlier attempt keeps writing to the old, unlinked file. A stale handle (NFS) is therefore only reopened if no
    other attempt has replaced the file.

    Args:
        run: the run folder.
        step: step that training resumes after; rows of later steps are dropped, so that each step has one row.
        total_steps: number of steps, shown in log lines.

    Attributes:
        kept: last training row up to `step`; None if there is none.
        last: last training row before later ones were dropped; None if there is none.
    """

    def __init__(self, run: Path, step: int, total_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.total_steps = total_steps
        self._run, self._path = run, run / run_files.METRICS
        self.kept, self.last = truncate(self._path, step)
        self.file = self._path.open("ab", buffering=0)
        self._inode = os.fstat(self.file.fileno()).st_ino
        self._attempt = state_files.read_text(run / run_files.ATTEMPT)
        self._unwritten: list[bytes] = []
        # Also after step 0, from which an earlier attempt may have begun.
        self._tensorboard = SummaryWriter(str(run / run_files.TENSORBOARD), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row, which has a `step`."""
        self._unwritten.append(json.dumps(row).encode() + b"\n")
        error = self.flush()
        if error and len(self._unwritten) == 1:
            log.warning(f"metrics cannot be written: {error}; buffering them until they can")
        try:
            for name, value in scalars(row):
                self._tensorboard.add_scalar(name, value, row["step"])
        except OSError as error:  # a full disk, raised by TensorBoard's writer thread
            log.debug(f"TensorBoard file is incomplete: {error}")

    def flush(self) -> OSError | None:
        """Write the buffered rows; returns the error if some still cannot be written."""
        try:
            while self._unwritten:
                self._append(self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            return error
        return None

    def _append(self, line: bytes) -> None:
        """Write the complete line, or nothing; reopens the file if its handle is stale."""
        try:
            self._write_line(line)
        except OSError as error:
            if error.errno != errno.ESTALE or not self._reopen():
                raise
            self._write_line(line)

    def _reopen(self) -> bool:
        """Open the file again, unless another attempt has replaced it; returns whether it is open."""
        file = self._path.open("r+b", buffering=0)
        inode = os.fstat(file.fileno()).st_ino
        # A later file may have the inode of ours, which was freed.
        if inode != self._inode or state_files.read_text(self._run / run_files.ATTEMPT) != self._attempt:
            file.close()
            return False
        with contextlib.suppress(OSError):
            self.file.close()
        self.file = file
        return True

    def _write_line(self, line: bytes) -> None:
        size = self.file.seek(0, 2)
        if self.file.write(line) < len(line):
            self.file.truncate(size)
            raise OSError(errno.ENOSPC, "no space left on the device")

    def log_line(self, row: dict[str, Any], seconds_left: float | None) -> str:
        """A step as a log line: loss, learning rate, norms, samples, step time and, if known, time left."""
        left = "" if seconds_left is None else f"  left {timedelta(seconds=int(seconds_left))}"
        mfu = f"  mfu {row['mfu']:.1%}" if row["mfu"] is not None else ""
        return (
            f"step {row['step']}/{self.total_steps}  loss {row['loss']:.4f}  lr {row['learning_rate']:.3e}  "
            f"grad norm {row['gradient_norm']:.3f}  param norm {row['parameter_norm']:.2f}  "
            f"samples {row['consumed_samples']}  {row['step_seconds']:.3f} s/step  "
            f"{row['tokens_per_second']:,.0f} tokens/s{mfu}{left}"
        )

    def close(self) -> None:
        """Write the buffered rows; logs a warning if some are lost."""
        if error := self.flush():
            log.warning(f"{self._path}: buffered rows are lost ({len(self._unwritten)}): {error}")
        try:
            self.file.close()
        except OSError as error:  # on a network file system, of earlier writes
            log.warning(f"{self._path}: the last rows may be lost: {error}")
        with contextlib.suppress(OSError):
            self._tensorboard.close()


def truncate(path: Path, step: int) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Drop the rows of later steps; returns the last training row after that, and before that."""
    text = state_files.read_text(path)
    if text is None:
        return None, None
    lines = text.splitlines()
    kept = [line for line in lines if _step(line) <= step]
    state_files.write(path, "".join(f"{line}\n" for line in kept))
    return _last_training_row(kept), _last_training_row(lines)


def evaluated(run: Path, step: int) -> bool:
    """Whether a run's metrics have an evaluation of this step's weights."""
    return any("validation_loss" in row and row.get("step") == step for row in _rows(run / run_files.METRICS))


def checkpoint_completed(run: Path) -> bool:
    """Whether a run's metrics show that it has completed a checkpoint; unknown cases are False.

    `checkpoint_seconds` grows once or twice per save: when it begins and, if asynchronous, when it ends. Events count those that
    failed, and the last one may not have ended.
    """
    seconds = (row.get("checkpoint_seconds") for row in _rows(run / run_files.METRICS))
    totals = {each for each in seconds if isinstance(each, int | float)} - {0.0}
    failed = sum(row.get("event") == "not saved" for row in _rows(run / run_files.EVENTS))
    return len(totals) > 2 * failed + 1


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a .jsonl file, without corrupted lines; none if it does not exist."""
    lines = (state_files.read_text(path) or "").splitlines()
    return (row for row in map(state_files.parse, lines) if row is not None)


def _last_training_row(lines: Sequence[str]) -> dict[str, Any] | None:
    for line in reversed(lines):
        if _step(line) < float("inf") and "loss" in (row := json.loads(line)):
            return row
    return None


def record_event(run: Path, event: str, *, reason: str, **facts: Any) -> None:
    """Append an event to RUN/events.jsonl, which the run's report reads; `facts` may override `time`.

    A write error loses the event, which the log contains too, and does not stop the run.
    """
    row = {"event": event, "time": round(time.time(), 3), "reason": reason, **facts}
    with contextlib.suppress(OSError):
        state_files.append_line(run / run_files.EVENTS, json.dumps(row))


def current_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl with current names, also of a run that an earlier version began."""
    return {RENAMED.get(name, name): value for name, value in row.items()}


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Tag and value of each number in a row of metrics.jsonl, for TensorBoard and trackers."""
    for name, value in current_names(row).items():
        if name not in ("step", "time") and isinstance(value, int | float):
            yield tag(name), value
        for suffix, first in LISTS.items():
            if name.endswith(suffix):
                for place, number in enumerate(value, first):
                    yield f"{tag(name.removesuffix(suffix))}/{suffix.removeprefix('_by_')}_{place}", number


def tag(name: str) -> str:
    """TensorBoard tag of a metric, such as 'time/step_seconds'; of no group, 'evaluation/accuracy'."""
    if name.startswith(OF_TASKS):
        return name
    metric = name.partition("/")[0]  # validation_loss/<source> is in the group of validation_loss
    group = next((group for group, names in GROUPS.items() if metric in names), "evaluation")
    return f"{group}/{name}"


def _step(line: str) -> float:
    """The step of a row; infinity for a corrupted line, so that it is dropped."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
