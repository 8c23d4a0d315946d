"""The progress line of a training run, fitted to the width of the terminal."""

import io
import json
import logging

import pytest
from rich.console import Console

from flows.ui import console, progress
from flows.ui.artifacts import PrefectArtifact
from flows.ui.console import ProgressFilter, TerminalHandler
from flows.ui.progress import ProgressReporter, TrainingProgress, step_parts
from profiles import resolve
from tests.profiles.pair import PAIR

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
    """What a terminal of a given width shows of a line, by default a progress line."""

    def on_terminal(parts: list[str], width: int, **attributes: object) -> str:
        screen = io.StringIO()
        terminal = TerminalHandler(Console(file=screen, force_terminal=True, color_system=None, width=width))
        record = logging.makeLogRecord({"name": "flows", "levelno": logging.INFO, "msg": "  ".join(parts)})
        vars(record).update(attributes or {"progress": parts})
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


def test_a_rising_validation_loss_is_warned_about_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(PrefectArtifact, "update", lambda *_, **__: None)
    caplog.set_level(logging.INFO)
    progress = TrainingProgress(resolve.load(PAIR), tmp_path)
    progress.update()
    with (tmp_path / "metrics.jsonl").open("w") as metrics:
        for step, loss in ((100, 0.71), (200, 0.9), (300, 1.21)):
            metrics.write(json.dumps({"step": step, "validation_loss": loss}) + "\n")
    progress.update()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["INFO", "INFO", "WARNING", "INFO"]
    assert lines[0][1] == "step 100: validation loss on 4 batches 0.7100"
    assert "from 0.7100 at step 100 to 0.9000 at step 200" in lines[2][1]


def test_step_notes_wrap_between_words_with_a_hanging_indent(shown):
    seen = shown(["plan", "done", "2.74 million parameters, 11.8 GiB per device"], 30, indent=12)
    assert (
        seen == "plan  done  2.74 million\n" + " " * 12 + "parameters, 11.8\n" + " " * 12 + "GiB per device\n"
    )
    assert console.fold("the loss rose; run the same command again", 24) == (
        "the loss rose; run the\nsame command again"
    )
    for line in (
        "to convert it: trainshed convert store/runs/tiny model",
        "[rank 0] File a.py, line 2, in loss",
    ):
        assert console.fold(line, 24) == line


def test_part_wider_than_the_terminal_is_truncated(shown):
    seen = shown(["a shard with a long name", "45%"], 20)
    assert "a shard with a long…" in seen


def test_work_of_unknown_length_shows_a_spinner_and_elapsed_time(shown, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    ProgressReporter("graphs", "Progress")("tracing the programs of the run", 0.0)
    console.log_waiting(logging.getLogger("flows"), "train tiny to step 900")  # the job starts
    record, waiting = caplog.records
    assert "⠋ train tiny to step 900" in shown(waiting.progress, 80)
    assert not ProgressFilter(0.0).filter(waiting)  # elsewhere than in a terminal, it says nothing new
    assert record.getMessage() == "tracing the programs of the run"  # not "0%"
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.0)
    seen = shown(record.progress, 80)
    assert "⠋ tracing the programs of the run  (0.0 s)" in seen


@pytest.mark.parametrize("longest", [0.0, 60.0])
def test_only_long_waits_are_shown(monkeypatch, capsys, longest):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setattr(console, "SHORT_WAIT", longest)
    with console.waiting(lambda: "loading"):
        pass
    assert ("loading" in capsys.readouterr().err) == (not longest)


def test_bar_of_a_step_that_is_done_is_complete(monkeypatch):
    bars = []
    monkeypatch.setattr(PrefectArtifact, "update", lambda self, render, *, now: bars.append((render(), now)))
    progress = ProgressReporter("inputs", "Progress")
    progress("listing source 1 of 2", 0.0)
    progress.finish()
    assert bars == []  # it was over before there was a bar
    progress("listing source 2 of 2", 0.5)
    progress.finish()
    progress.finish()
    assert bars == [(50.0, False), (100.0, True)]


def test_progress_is_throttled_and_other_records_are_not(monkeypatch):
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    throttle, passed = ProgressFilter(15.0), []
    for now in (100.0, 101.0, 114.0, 115.0):
        for extra in ({"progress": ("step 1",)}, {}):
            if throttle.filter(logging.makeLogRecord(extra)):
                passed.append((now, "progress" in extra))
    assert [when for when, is_progress in passed if is_progress] == [100.0, 115.0]
    assert len([when for when, is_progress in passed if not is_progress]) == 4


def test_after_a_restart_only_new_steps_and_evaluations_are_shown(tmp_path, monkeypatch, caplog):
    """Training that resumes from step 4 drops the rows of steps 5 and 6, and evaluates step 6 again."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(PrefectArtifact, "update", lambda *_, **__: None)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    following = TrainingProgress(resolve.load(PAIR), tmp_path)
    metrics = tmp_path / "metrics.jsonl"

    def write(*steps: int) -> list[str]:
        """What is shown once the file has these steps, every other one evaluated."""
        rows = [{**ROW, "step": step} for step in steps]
        rows += [{"step": step, "validation_loss": 1.0} for step in steps if step % 2 == 0]
        partial = metrics.with_suffix(".partial")
        partial.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        partial.replace(metrics)
        caplog.clear()
        following.update()
        return [record.getMessage() for record in caplog.records]

    following.update()
    first = write(1, 2, 3, 4, 5, 6)
    evaluated = [line.partition(":")[0] for line in first if "validation" in line]
    assert evaluated == ["step 2", "step 4", "step 6"]
    assert any(line.startswith("step   6/300") for line in first)
    assert write(1, 2, 3, 4) == []
    with metrics.open("a") as file:
        for row in ({**ROW, "step": 5}, {**ROW, "step": 6}, {"step": 6, "validation_loss": 1.0}):
            file.write(f"{json.dumps(row)}\n")
    caplog.clear()
    following.update()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("step   6/300")


@pytest.mark.parametrize("width", [80, 94, 120])
def test_last_columns_are_below_the_rows_of_a_table_too_wide_for_the_terminal(width):
    rows = [["tiny-branches-500-100", "finished", "51.2 MiB" + " " * 30, "tiny-branches-trunk@500"]]
    rows.append(["tiny", "finished", "44.5 MiB", ""])
    output = io.StringIO()
    terminal = Console(file=output, force_terminal=True, width=width, color_system=None)
    console.print_table(terminal, ("run", "state", "size", "parent"), rows, left={0, 1, 3}, folds=True)
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line.endswith(" ")] == []
    assert ("  parent tiny-branches-trunk@500" in lines) == (width == 80)
    assert lines[0].endswith("parent") == (width > 80)


def test_a_table_too_wide_for_the_terminal_is_printed_in_parts():
    titles = ("run", "parameters", "tokens", "price")
    rows = [["h512-l8-t10", "159M", "1.26G", "1.63"], ["llama3-8b-h100", "8.03G", "839G", "71,239.55"]]
    shown = {}
    for width in (30, 80):
        terminal = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
        console.print_parts(terminal, titles, rows, left=(0, 3))
        shown[width] = terminal.file.getvalue().splitlines()
        assert max(map(len, shown[width])) <= width
        assert all(cell in "\n".join(shown[width]) for row in rows for cell in row)
    names = ["run", "h512-l8-t10", "llama3-8b-h"]
    assert [line[:11].strip() for line in shown[30]] == [*names, "", *names, "", *names]
    assert len(shown[80]) == 3
    assert "1.26G  1.63" in shown[80][1]  # the column named by its number is aligned to the left, too
