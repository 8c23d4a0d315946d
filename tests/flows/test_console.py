"""The line that moves while training runs, as wide as the terminal that it is read on."""

import io
import logging

import pytest
from rich.console import Console

from flows.ui.console import TerminalHandler
from flows.ui.progress import step_parts

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


def test_a_part_that_is_wider_than_the_terminal_is_cut(shown):
    seen = shown(["a shard with a long name", "45%"], 20)
    assert "a shard with a long…" in seen
