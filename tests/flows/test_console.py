"""The line that moves while training runs, as wide as the terminal that it is read on."""

import io
import json
import logging

import pytest
from rich.console import Console

from flows.ui.artifacts import PrefectArtifact
from flows.ui.console import TerminalHandler
from flows.ui.progress import TrainingProgress, step_parts
from profiles import resolve

STEPS = 2_000_000
ROW = {
    "step": 1_234_567,
    "loss": 2.34567,
    "learning_rate": 1.5e-4,
    "gradient_norm": 0.5123,
    "tokens_per_second": 1_124_108.3,
    "step_seconds": 0.71,
    "mfu": 0.314,
}


@pytest.fixture
def shown():
    """What a terminal of a width shows of a line of progress."""

    def on_terminal(parts: list[str], width: int) -> str:
        screen = io.StringIO()
        terminal = TerminalHandler(Console(file=screen, force_terminal=True, color_system=None, width=width))
        record = logging.makeLogRecord({"name": "flows", "levelno": logging.INFO, "msg": "  ".join(parts)})
        record.progress = parts
        terminal.emit(record)
        terminal.end_progress()
        return screen.getvalue()

    return on_terminal


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (72, ["1234567/2000000", "loss 2.3457", "1,124,108 tokens/s", "150:57:37 left"]),
        (80, ["1234567/2000000", "loss 2.3457", "1,124,108 tokens/s", "150:57:37 left", "MFU 31.4%"]),
        (120, ["1,124,108 tokens/s", "150:57:37 left", "MFU 31.4%", "lr 1.50e-04", "grad norm 0.51"]),
    ],
)
def test_a_long_run_shows_its_speed_and_the_time_left_on_narrow_terminals(shown, width, parts):
    seen = shown(step_parts([ROW, ROW], STEPS), width)
    assert all(part in seen for part in parts), seen
    assert "…" not in seen


def test_a_rising_validation_loss_is_warned_about_once_it_is_measured(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(PrefectArtifact, "update", lambda *_, **__: None)
    caplog.set_level(logging.INFO)
    progress = TrainingProgress(resolve.load("tiny"), tmp_path)
    progress.update()
    with (tmp_path / "metrics.jsonl").open("w") as metrics:
        for step, loss in ((100, 0.71), (200, 0.9), (300, 1.21)):
            metrics.write(json.dumps({"step": step, "validation_loss": loss}) + "\n")
    progress.update()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["INFO", "INFO", "WARNING", "INFO", "WARNING"]
    assert lines[0][1] == "step 100: validation loss on 4 batches 0.7100"
    assert "from 0.7100 at step 100 to 1.2100 at step 300" in lines[-1][1]


def test_a_part_that_is_wider_than_the_terminal_is_cut(shown):
    seen = shown(["a shard with a long name", "45%"], 20)
    assert "a shard with a long…" in seen
