"""A run's metrics: one JSON line a step in metrics.jsonl, TensorBoard files, and a plain line for the log."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger("trainshed")

# Of TensorBoard's page; what is in none of them is a metric of the user's, under the name of its function.
GROUPS = {
    "loss": ("loss", "validation_loss"),
    "optimizer": ("learning_rate", "gradient_norm", "parameter_norm", "skipped"),
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
    "graphs": ("cold_compiles", "warm_graphs"),
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


class Metrics:
    """Writes metrics of a run, on the leading rank alone.

    A disk that is full for a while costs nothing: lines are kept and written later, whole ones only. What an earlier attempt
    that lives on somewhere goes on to write is lost with the file that it has open.

    Args:
        run: the run's folder.
        last: the step that training resumes after; lines of later steps are dropped, so that each step stands once.
        total: number of steps, for the time left.
    """

    def __init__(self, run: Path, last: int, total: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.total = total
        path = run / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_text(errors="replace").splitlines() if _step(line) <= last]
            partial = path.with_suffix(".partial")
            partial.write_text("".join(f"{line}\n" for line in kept))
            partial.replace(path)
        self.file = path.open("ab", buffering=0)
        self._waiting: list[bytes] = []
        self.board = SummaryWriter(str(run / "tensorboard"), purge_step=last + 1 if last else None)

    def write(self, values: dict[str, Any]) -> None:
        """One object, with its `step`."""
        self._waiting.append(json.dumps(values).encode() + b"\n")
        try:
            while self._waiting:
                self._append(self._waiting[0])
                del self._waiting[0]
        except OSError as error:
            if len(self._waiting) == 1:
                log.warning(f"WARNING metrics cannot be written, and wait until they can: {error}")
        try:
            for name, value in values.items():
                if name != "step" and isinstance(value, int | float):
                    self.board.add_scalar(tag(name), value, values["step"])
        except OSError as error:  # as which a full disk comes back from the board's thread
            log.debug(f"TensorBoard's file is behind: {error}")

    def _append(self, line: bytes) -> None:
        """The whole line, or none of it."""
        size = self.file.seek(0, 2)
        if self.file.write(line) < len(line):
            self.file.truncate(size)
            raise OSError(errno.ENOSPC, "no space left on the device")

    def line(self, values: dict[str, Any], seconds_left: float) -> str:
        """What users of these systems read: loss, rate, norms, step, samples, seconds an iteration, time left."""
        mfu = f"  mfu {values['mfu']:.1%}" if values["mfu"] is not None else ""
        return (
            f"step {values['step']}/{self.total}  loss {values['loss']:.4f}  lr {values['learning_rate']:.3e}  "
            f"grad norm {values['gradient_norm']:.3f}  param norm {values['parameter_norm']:.2f}  "
            f"samples {values['consumed_samples']}  {values['step_seconds']:.3f} s/step  "
            f"{values['tokens_per_second']:,.0f} tokens/s{mfu}  left {clock(seconds_left)}"
        )

    def close(self) -> None:
        self.file.close()
        with contextlib.suppress(OSError):
            self.board.close()


def tag(name: str) -> str:
    """Where TensorBoard shows a figure: 'step_seconds' -> 'time/step_seconds', and 'accuracy' -> 'evaluation/accuracy'."""
    group = next((group for group, names in GROUPS.items() if name in names), "evaluation")
    return f"{group}/{name}"


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _step(line: str) -> float:
    """The step of a line; a line that a crash cut short counts as later than any."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
