"""A run's metrics: one JSON line a step in metrics.jsonl, TensorBoard files, and a plain line for the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Metrics:
    """Writes metrics of a run, on the leading rank alone.

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
            kept = [line for line in path.read_text().splitlines() if _step(line) <= last]
            path.write_text("".join(f"{line}\n" for line in kept))
        self.file = path.open("a", buffering=1)
        self.board = SummaryWriter(str(run / "tensorboard"), purge_step=last + 1 if last else None)

    def write(self, values: dict[str, Any]) -> None:
        """One object, with its `step`."""
        self.file.write(json.dumps(values) + "\n")
        for name, value in values.items():
            if name != "step" and isinstance(value, int | float):
                self.board.add_scalar(name, value, values["step"])

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
        self.board.close()


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _step(line: str) -> float:
    """The step of a line; a line that a crash cut short counts as later than any."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")
